/* HTTP/1.1 server on one event loop.
 *
 * Life of a request: the header section is parsed, the route's handler is called once; it sets the callbacks it needs
 * and may answer at once or later. The body arrives piece by piece in on_body, then on_end. A handler that has not
 * answered keeps the request alive. After http_end() or one of the http_reply*() the request stays valid until control
 * returns to the event loop; on_close is then called exactly once and the request is freed. on_close is also called
 * (once) when the client vanishes; nothing may be written from within it. A body that nobody wants (no on_body, or the
 * answer is complete) is read and thrown away, within bounds.
 */
#ifndef ENVD_HTTP_H
#define ENVD_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <jansson.h>

#include "envd.h"

struct http_connection;
struct http_request;

typedef void (*http_handler)(struct http_request *req);

enum http_route_flags {
	HTTP_TOKEN = 0,       /* the access token is checked before the handler is called */
	HTTP_PUBLIC = 1 << 0, /* no check by the server: /health, and /files, which also takes signatures */
	HTTP_HOST = 1 << 1,   /* only from the host's addresses; no token */
	HTTP_EARLY = 1 << 2,  /* looks at no file: called though identity.c has yet to write its own */
};

struct http_header {
	char *name; /* lower case */
	char *value;
};

struct http_request {
	struct envd *envd;
	const char *method;       /* "GET", ... */
	char *path;               /* percent-decoded, without query; never contains NUL */
	char *query;              /* raw, "" when absent */
	struct http_header *headers;
	size_t n_headers;
	int64_t content_length;   /* -1: chunked; 0: no body */

	bool patient;             /* set by a handler: silence of the client is no reason to cut the connection */
	void *state;              /* the handler's own */
	void (*on_body)(struct http_request *req, const char *data, size_t len); /* len > 0 */
	void (*on_end)(struct http_request *req);   /* body complete (also called for an empty body) */
	void (*on_drain)(struct http_request *req); /* output was above HTTP_HIGH_WATER and is now empty */
	void (*on_close)(struct http_request *req); /* last call, see above: free `state` here */

	/* server.c only */
	struct http_connection *conn;
	struct http_header *out_headers;
	size_t n_out_headers;
	uint64_t body_seen;
	bool keep_alive, head_only, http10;
	bool body_complete, body_paused;
	const struct route *route;
	bool started, chunked, finished, closed, want_drain;
};

/* A writer that sees more than this queued should stop until on_drain. */
#ifndef HTTP_HIGH_WATER /* the fuzz targets have a low one */
#define HTTP_HIGH_WATER (256 * 1024)
#endif

struct http_server *http_server_new(struct envd *envd);
void http_server_free(struct http_server *server);
/* Listens on `address` ("0.0.0.0", "::" = both families); 0 = any port. Returns the port or -1 with errno set. */
int http_server_listen(struct http_server *server, const char *address, uint16_t port);
/* `method` and `path` must outlive the server (string literals). */
void http_route(struct envd *envd, const char *method, const char *path, unsigned flags, http_handler handler);
/* As http_route, with one pointer given back by http_route_data(). */
void http_route_with(struct envd *envd, const char *method, const char *path, unsigned flags, http_handler handler,
		     const void *data);
const void *http_route_data(const struct http_request *req);

/* First header of that (lower-case) name, or NULL. */
const char *http_header(const struct http_request *req, const char *name);
/* First query parameter of that name, decoded ('+' is a space); malloc'ed, NULL when absent or badly encoded (%00 too). */
char *http_query(const struct http_request *req, const char *name);
/* True when the peer's address is one of the host's. */
bool http_from_host(const struct http_request *req);

/* Back-pressure on the request body: no on_body after http_pause_body() returns, until http_resume_body(). */
void http_pause_body(struct http_request *req);
void http_resume_body(struct http_request *req);

/* Answers. http_add_header() comes before any of them; Content-Length, Transfer-Encoding, Connection and CORS headers
 * are the server's. `content_type` may be NULL. */
void http_add_header(struct http_request *req, const char *name, const char *value);
void http_reply(struct http_request *req, int status, const char *content_type, const void *body, size_t len);
/* Takes the reference of `body`. */
void http_reply_json(struct http_request *req, int status, json_t *body);
/* {"code": status, "message": text} */
void http_reply_error(struct http_request *req, int status, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* Sends `len` bytes of a regular file from `offset` with sendfile(2); takes the descriptor. If the file turns out to
 * be shorter the connection is cut. */
void http_reply_fd(struct http_request *req, int status, const char *content_type, int fd, off_t offset, uint64_t len);

/* A body in pieces: length known (>= 0) or -1 for chunked (on HTTP/1.0: until close). */
void http_start(struct http_request *req, int status, const char *content_type, int64_t length);
void http_write(struct http_request *req, const void *data, size_t len);
/* Gathers: both parts become one chunk and one write. */
void http_write2(struct http_request *req, const void *head, size_t head_len, const void *data, size_t len);
void http_end(struct http_request *req);
/* Cuts the connection: the answer cannot be completed. */
void http_abort(struct http_request *req);
/* Bytes queued and not yet taken by the kernel. Above HTTP_HIGH_WATER, on_drain follows. */
size_t http_pending(const struct http_request *req);

/* Ends HTTP on this connection: answers 101 with the added headers and returns the connected socket (non-blocking)
 * once the 101 is on its way; bytes that came after the request are put in *early (malloc'ed), *early_len. The request is closed as
 * after http_end(). Returns -1 when the client is gone. To be called from the event loop only, never from within the
 * handler or its on_body/on_end: the parser still holds what came early. */
int http_upgrade(struct http_request *req, const char *protocol, char **early, size_t *early_len);

/* Percent-decodes `len` bytes into a malloc'ed string; NULL on bad escapes or NUL. */
char *http_percent_decode(const char *text, size_t len, bool plus_is_space);

#endif
