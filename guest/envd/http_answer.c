/* Answers out: heads, bodies whole or in pieces, files, upgrades. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "http_internal.h"

const char *http_status_text(int status)
{
	static const struct {
		int status;
		const char *text;
	} known[] = {
		{101, "Switching Protocols"}, {200, "OK"}, {201, "Created"}, {204, "No Content"},
		{206, "Partial Content"}, {304, "Not Modified"}, {400, "Bad Request"}, {401, "Unauthorized"},
		{403, "Forbidden"}, {404, "Not Found"}, {405, "Method Not Allowed"}, {406, "Not Acceptable"},
		{408, "Request Timeout"}, {409, "Conflict"}, {412, "Precondition Failed"}, {413, "Content Too Large"},
		{415, "Unsupported Media Type"}, {416, "Range Not Satisfiable"}, {417, "Expectation Failed"},
		{429, "Too Many Requests"}, {431, "Request Header Fields Too Large"},
		{499, "Client Closed Request"}, {500, "Internal Server Error"}, {501, "Not Implemented"},
		{502, "Bad Gateway"}, {503, "Service Unavailable"}, {504, "Gateway Timeout"},
		{505, "HTTP Version Not Supported"}, {507, "Insufficient Storage"},
	};
	size_t i;

	for (i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].status == status)
			return known[i].text;
	return "Unknown";
}

void http_add_header(struct http_request *req, const char *name, const char *value)
{
	struct http_header *more;
	char *c;

	if (req->started || req->closed)
		return;
	more = realloc(req->out_headers, (req->n_out_headers + 1) * sizeof *more);
	if (!more)
		return;
	req->out_headers = more;
	more += req->n_out_headers;
	more->name = strdup(name);
	more->value = strdup(value);
	if (!more->name || !more->value) {
		free(more->name);
		free(more->value);
		return;
	}
	for (c = more->value; *c; c++) /* a value never ends its line */
		if (*c == '\r' || *c == '\n')
			*c = ' ';
	req->n_out_headers++;
}

static void add_date(struct evbuffer *out)
{
	char text[64];
	struct tm parts;
	time_t now = time(NULL);

	if (gmtime_r(&now, &parts) && strftime(text, sizeof text, "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &parts))
		evbuffer_add(out, text, strlen(text));
}

static bool has_body(const struct http_request *req, int status)
{
	return !req->head_only && status >= 200 && status != 204 && status != 304;
}

/* `length` -1: in pieces. */
static void write_head(struct http_request *req, int status, const char *content_type, int64_t length)
{
	struct evbuffer *out = req->conn->out;
	size_t i;

	req->started = true;
	evbuffer_add_printf(out, "HTTP/1.1 %d %s\r\n", status, http_status_text(status));
	add_date(out);
	if (content_type)
		evbuffer_add_printf(out, "Content-Type: %s\r\n", content_type);
	if (length >= 0 && status >= 200 && status != 204 && status != 304) {
		evbuffer_add_printf(out, "Content-Length: %lld\r\n", (long long)length);
	} else if (length < 0) {
		req->chunked = !req->http10 && has_body(req, status);
		if (req->chunked)
			evbuffer_add_printf(out, "Transfer-Encoding: chunked\r\n");
		else if (req->http10)
			req->keep_alive = false; /* the end of the connection is the end of the body */
	}
	if (http_header(req, "origin"))
		evbuffer_add_printf(out, "Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n");
	for (i = 0; i < req->n_out_headers; i++)
		evbuffer_add_printf(out, "%s: %s\r\n", req->out_headers[i].name, req->out_headers[i].value);
	if (!req->keep_alive)
		evbuffer_add_printf(out, "Connection: close\r\n");
	else if (req->http10)
		evbuffer_add_printf(out, "Connection: keep-alive\r\n");
	evbuffer_add(out, "\r\n", 2);
	if (!has_body(req, status))
		req->head_only = true;
}

static void finish(struct http_request *req)
{
	req->finished = true;
	connection_schedule(req->conn);
}

void http_reply(struct http_request *req, int status, const char *content_type, const void *body, size_t len)
{
	if (req->closed || req->started)
		return;
	if (!req->body_complete && http_header(req, "expect")) {
		req->keep_alive = false; /* the client may or may not send the body it announced */
		req->body_complete = true;
	}
	write_head(req, status, content_type, (int64_t)len);
	if (!req->head_only && len > 0)
		evbuffer_add(req->conn->out, body, len);
	finish(req);
}

void http_reply_json(struct http_request *req, int status, json_t *body)
{
	char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;

	json_decref(body);
	if (!text) {
		http_reply_error(req, 500, "the answer could not be encoded");
		return;
	}
	http_reply(req, status, "application/json", text, strlen(text));
	free(text);
}

void http_reply_error(struct http_request *req, int status, const char *format, ...)
{
	char message[1024];
	va_list args;
	json_t *text;

	va_start(args, format);
	vsnprintf(message, sizeof message, format, args);
	va_end(args);
	text = json_string(message); /* NULL: not UTF-8 (part of a path, say) */
	if (!text)
		text = json_string(http_status_text(status));
	http_reply_json(req, status, json_pack("{s:i, s:o}", "code", status, "message", text));
}

void http_reply_fd(struct http_request *req, int status, const char *content_type, int fd, off_t offset, uint64_t len)
{
	struct http_connection *conn = req->conn;

	if (req->closed || req->started) {
		close(fd);
		return;
	}
	write_head(req, status, content_type, (int64_t)len);
	if (req->head_only || len == 0) {
		close(fd);
	} else {
		conn->file = fd;
		conn->file_offset = offset;
		conn->file_left = len;
	}
	finish(req);
}

/* ---- in pieces ---- */

void http_start(struct http_request *req, int status, const char *content_type, int64_t length)
{
	if (req->closed || req->started)
		return;
	write_head(req, status, content_type, length);
	connection_schedule(req->conn);
}

void http_write2(struct http_request *req, const void *head, size_t head_len, const void *data, size_t len)
{
	struct evbuffer *out;

	if (req->closed || req->finished || req->head_only || head_len + len == 0)
		return;
	out = req->conn->out;
	if (req->chunked)
		evbuffer_add_printf(out, "%zx\r\n", head_len + len);
	if (evbuffer_add(out, head, head_len) < 0 || evbuffer_add(out, data, len) < 0)
		req->conn->broken = true; /* a hole in the answer is worse than none */
	if (req->chunked)
		evbuffer_add(out, "\r\n", 2);
	if (evbuffer_get_length(out) > HTTP_HIGH_WATER)
		req->want_drain = true;
	connection_schedule(req->conn);
}

void http_write(struct http_request *req, const void *data, size_t len)
{
	http_write2(req, data, len, NULL, 0);
}

void http_end(struct http_request *req)
{
	if (req->closed || req->finished)
		return;
	if (req->chunked)
		evbuffer_add(req->conn->out, "0\r\n\r\n", 5);
	finish(req);
}

void http_abort(struct http_request *req)
{
	if (req->closed)
		return;
	req->conn->broken = true;
	connection_schedule(req->conn);
}

size_t http_pending(const struct http_request *req)
{
	return req->closed ? 0 : evbuffer_get_length(req->conn->out);
}

/* ---- back-pressure on the request ---- */

void http_pause_body(struct http_request *req)
{
	req->body_paused = true;
}

void http_resume_body(struct http_request *req)
{
	if (!req->body_paused || req->closed)
		return;
	req->body_paused = false;
	connection_schedule(req->conn);
}

/* ---- the odd cases ---- */

void http_refuse(struct http_connection *conn, int status)
{
	struct http_request plain = {.conn = conn, .envd = conn->server->envd};

	conn->closing = true;
	if (!conn->req) {
		http_reply_error(&plain, status, "%s", http_status_text(status));
		return;
	}
	conn->req->body_complete = true; /* nothing more can be made of the input */
	conn->req->keep_alive = false;
	if (conn->req->started && !conn->req->finished)
		conn->broken = true;
	else
		http_reply_error(conn->req, status, "%s", http_status_text(status));
}

int http_upgrade(struct http_request *req, const char *protocol, char **early, size_t *early_len)
{
	struct http_connection *conn = req->conn;
	size_t i;
	int fd;

	*early = NULL;
	*early_len = 0;
	if (req->closed || req->started || conn->broken)
		return -1;
	req->started = true;
	evbuffer_add_printf(conn->out, "HTTP/1.1 101 %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n",
			    http_status_text(101), protocol);
	for (i = 0; i < req->n_out_headers; i++)
		evbuffer_add_printf(conn->out, "%s: %s\r\n", req->out_headers[i].name, req->out_headers[i].value);
	evbuffer_add(conn->out, "\r\n", 2);
	/* Earlier answers are out before a request is taken, so the socket's buffer has room for these bytes. */
	while (evbuffer_get_length(conn->out) > 0 && evbuffer_write(conn->out, conn->fd) > 0)
		;
	if (evbuffer_get_length(conn->out) > 0) {
		http_abort(req);
		return -1;
	}
	if (conn->in) {
		*early_len = evbuffer_get_length(conn->in);
		*early = malloc(*early_len);
		if (!*early) {
			http_abort(req);
			return -1;
		}
		evbuffer_remove(conn->in, *early, *early_len);
	}
	fd = conn->fd;
	event_del(&conn->read_event);
	event_del(&conn->write_event);
	conn->reading = conn->writing = false;
	conn->fd = -1;
	http_abort(req); /* the connection's record ends, the socket lives on */
	return fd;
}
