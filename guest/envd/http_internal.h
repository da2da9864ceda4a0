/* What the HTTP modules share: server.c (listening), http_connection.c, http_parse.c (requests in), http_answer.c
 * (answers out), http_route.c. */
#ifndef ENVD_HTTP_INTERNAL_H
#define ENVD_HTTP_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <time.h>
#include <event2/buffer.h>
#include <event2/event_struct.h>
#include <http_parser.h>

#include "http.h"

enum {
	HTTP_READ_CHUNK = 64 * 1024,         /* one recv() */
	HTTP_MAX_HEADERS = 128,
	HTTP_MAX_HEAD_BYTES = 64 * 1024,     /* request target and header section */
	HTTP_MAX_AHEAD = 64 * 1024,          /* unparsed bytes kept while a request is being answered */
	HTTP_MAX_DISCARD = 64 * 1024 * 1024, /* rest of a body read for nothing, so that the client sees the answer */
	HTTP_MAX_CONNECTIONS = 8192,
	HTTP_MAX_ROUTES = 64,
	HTTP_MAX_LISTENERS = 4,
	HTTP_HEAD_SECONDS = 60,              /* a started header section must be complete */
	HTTP_IDLE_SECONDS = 620,             /* longer than any client keeps an idle connection (300 s) */
	HTTP_STALL_SECONDS = 300,            /* body without a byte, or finished answer that nobody takes */
	HTTP_LINGER_SECONDS = 5,
};

struct route {
	const char *method, *path;
	unsigned flags;
	http_handler handler;
	const void *data;
};

/* The header section being received: all text in one buffer, cut up by offsets. */
struct http_head {
	char *text;
	size_t len, size;
	size_t target_len;                     /* the request target is text[0..target_len) */
	struct {
		size_t name, name_len, value, value_len;
	} fields[HTTP_MAX_HEADERS];
	size_t n_fields;
	bool in_value;
};

struct http_connection {
	LIST_ENTRY(http_connection) link;
	struct http_server *server;
	int fd;
	struct event read_event, write_event, run_event;
	bool reading, writing;     /* which events are in the loop */
	bool scheduled;            /* run_event is active */
	bool from_host;
	bool eof;                  /* the peer has ended its direction */
	bool broken;               /* cut it, nothing more can be said */
	bool closing;              /* no further request; close when the answer is out */
	bool lingering;            /* our direction is ended; input is thrown away until the peer ends its own */
	http_parser parser;
	struct http_head *head;    /* NULL outside a header section */
	int refuse;                /* HTTP status the parser callbacks refuse the request with, or 0 */
	struct evbuffer *in;       /* bytes the parser has not taken yet, NULL while there are none */
	struct evbuffer *out;
	struct http_request *req;
	int file;                  /* sendfile source that follows `out`, or -1 */
	off_t file_offset;
	uint64_t file_left;
	uint64_t discarded;
	time_t progress;           /* second of the last byte either way */
	time_t head_since;         /* second of the first byte of an unfinished header section */
};

struct http_listener {
	struct event event;
	int fd;
};

struct http_server {
	struct envd *envd;
	struct route routes[HTTP_MAX_ROUTES];
	size_t n_routes;
	struct http_listener listeners[HTTP_MAX_LISTENERS];
	size_t n_listeners;
	LIST_HEAD(http_connections, http_connection) connections;
	size_t n_connections;
	bool accepting, sweeping;
	bool trim;                 /* something was freed since the last malloc_trim() */
	struct event sweep;
	http_parser_settings settings;
	char buffer[HTTP_READ_CHUNK];
};

/* server.c */
void http_accepting_resume(struct http_server *server); /* descriptors or connections have become free */

/* http_connection.c */
time_t http_now(void); /* monotonic seconds */
struct http_connection *connection_new(struct http_server *server, int fd, bool from_host); /* NULL: no memory */
void connection_readable(struct http_connection *conn); /* may free it */
void connection_free(struct http_connection *conn);
bool connection_overdue(const struct http_connection *conn, time_t now);
void connection_schedule(struct http_connection *conn); /* run it once control is back in the loop */
void request_free(struct http_request *req);

/* http_parse.c */
void http_parse_init(http_parser_settings *settings);
void http_parse_reset(struct http_connection *conn);
void http_head_free(struct http_connection *conn);
/* Feeds bytes; returns how many were taken. Stops early when paused. Sets conn->refuse on bad input. */
size_t http_parse(struct http_connection *conn, const char *data, size_t len);

/* http_answer.c */
const char *http_status_text(int status);
/* Answers a request that could not be parsed; the connection ends with it. */
void http_refuse(struct http_connection *conn, int status);

/* http_route.c */
void http_dispatch(struct http_request *req);

#endif
