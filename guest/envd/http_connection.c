/* Connections of the HTTP server: read, parse, answer, keep alive, end. See http.h for the life of a request.
 *
 * Whatever a handler calls only queues and schedules. Connections are torn down in connection_run() alone, which is
 * entered from the event loop, so no handler ever sees its request vanish under it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http_internal.h"

enum { SENDFILE_CHUNK = 1 << 20, SENDFILE_BURST = 4 << 20, READ_BURST = 4 };

static void connection_run(struct http_connection *conn);

time_t http_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec;
}

/* ---- end of a request and of a connection ---- */

void request_free(struct http_request *req)
{
	size_t i;

	for (i = 0; i < req->n_headers; i++) {
		free(req->headers[i].name);
		free(req->headers[i].value);
	}
	for (i = 0; i < req->n_out_headers; i++) {
		free(req->out_headers[i].name);
		free(req->out_headers[i].value);
	}
	free(req->headers);
	free(req->out_headers);
	free(req->path);
	free(req->query);
	free(req);
}

static void request_close(struct http_connection *conn)
{
	struct http_request *req = conn->req;

	if (!req)
		return;
	req->closed = true;
	if (req->on_close)
		req->on_close(req);
	conn->req = NULL;
	request_free(req);
}

void connection_free(struct http_connection *conn)
{
	struct http_server *server = conn->server;

	request_close(conn);
	event_del(&conn->read_event);
	event_del(&conn->write_event);
	event_del(&conn->run_event);
	http_head_free(conn);
	if (conn->in)
		evbuffer_free(conn->in);
	evbuffer_free(conn->out);
	if (conn->file >= 0)
		close(conn->file);
	if (conn->fd >= 0)
		close(conn->fd);
	LIST_REMOVE(conn, link);
	free(conn);
	server->n_connections--;
	server->trim = true;
	http_accepting_resume(server);
}

/* ---- output ---- */

static bool output_empty(const struct http_connection *conn)
{
	return evbuffer_get_length(conn->out) == 0 && conn->file < 0;
}

static bool would_block(int error)
{
	return error == EAGAIN || error == EINTR;
}

/* True when there is more to do later. */
static bool flush_buffer(struct http_connection *conn)
{
	while (evbuffer_get_length(conn->out) > 0) {
		int sent = evbuffer_write(conn->out, conn->fd);

		if (sent < 0) {
			if (!would_block(errno))
				conn->broken = true;
			return true;
		}
		conn->progress = http_now();
	}
	return false;
}

static void flush_file(struct http_connection *conn)
{
	size_t burst = 0;

	while (conn->file_left > 0 && burst < SENDFILE_BURST) {
		size_t want = conn->file_left < SENDFILE_CHUNK ? conn->file_left : SENDFILE_CHUNK;
		ssize_t sent = sendfile(conn->fd, conn->file, &conn->file_offset, want);

		if (sent < 0 && would_block(errno))
			return;
		if (sent <= 0) { /* an error, or the file has shrunk: the promised length cannot be kept */
			conn->broken = true;
			return;
		}
		conn->file_left -= (uint64_t)sent;
		burst += (size_t)sent;
		conn->progress = http_now();
	}
	if (conn->file_left == 0) {
		close(conn->file);
		conn->file = -1;
	}
}

static void connection_flush(struct http_connection *conn)
{
	if (conn->broken || conn->lingering || flush_buffer(conn))
		return;
	if (conn->file >= 0)
		flush_file(conn);
}

/* ---- input ---- */

static void keep_input(struct http_connection *conn, const char *data, size_t len)
{
	if (len == 0)
		return;
	if (!conn->in)
		conn->in = evbuffer_new();
	if (!conn->in || evbuffer_add(conn->in, data, len) < 0)
		conn->broken = true;
}

/* The parser takes nothing while a request waits for its answer, or its handler for room. */
static bool parser_open(const struct http_connection *conn)
{
	if (conn->refuse || conn->closing || conn->broken)
		return false;
	if (!conn->req)
		return true;
	return !conn->req->body_complete && (!conn->req->body_paused || conn->req->finished);
}

static void feed(struct http_connection *conn, const char *data, size_t len)
{
	size_t taken = 0;

	if (!conn->in && parser_open(conn))
		taken = http_parse(conn, data, len);
	if (!conn->refuse)
		keep_input(conn, data + taken, len - taken);
}

static bool feed_kept(struct http_connection *conn)
{
	struct evbuffer_iovec piece;
	size_t taken;

	if (!conn->in || !parser_open(conn))
		return false;
	if (evbuffer_peek(conn->in, -1, NULL, &piece, 1) < 1)
		return false;
	taken = http_parse(conn, piece.iov_base, piece.iov_len);
	evbuffer_drain(conn->in, taken);
	if (evbuffer_get_length(conn->in) == 0) {
		evbuffer_free(conn->in);
		conn->in = NULL;
	}
	return taken > 0;
}

static bool want_input(const struct http_connection *conn)
{
	if (conn->eof || conn->broken)
		return false;
	if (conn->lingering)
		return true;
	return !conn->in || (evbuffer_get_length(conn->in) < HTTP_MAX_AHEAD && !parser_open(conn) &&
			     !(conn->req && conn->req->body_paused));
}

static void receive(struct http_connection *conn)
{
	int i;

	for (i = 0; i < READ_BURST && want_input(conn); i++) {
		ssize_t got = recv(conn->fd, conn->server->buffer, HTTP_READ_CHUNK, 0);

		if (got < 0) {
			if (!would_block(errno))
				conn->broken = true;
			return;
		}
		if (got == 0) {
			conn->eof = true;
			return;
		}
		conn->progress = http_now();
		if (!conn->lingering)
			feed(conn, conn->server->buffer, (size_t)got);
		else if ((conn->discarded += (uint64_t)got) > HTTP_MAX_DISCARD)
			conn->broken = true;
		if (got < HTTP_READ_CHUNK)
			return; /* all there was: the next recv() would only say so */
	}
}

/* ---- the state machine ---- */

/* The answer is complete and out: make room for the next request. True when the connection goes on. */
static bool request_done(struct http_connection *conn)
{
	bool keep_alive = conn->req->keep_alive && (!conn->eof || conn->in);

	request_close(conn);
	if (!keep_alive) {
		conn->closing = true;
		return false;
	}
	http_parse_reset(conn);
	return true;
}

static void start_linger(struct http_connection *conn)
{
	/* Closing with unread input makes the kernel send RST, which can destroy the answer on its way. */
	shutdown(conn->fd, SHUT_WR);
	conn->lingering = true;
	conn->progress = http_now();
	if (conn->in) {
		evbuffer_free(conn->in);
		conn->in = NULL;
	}
}

static void update_events(struct http_connection *conn)
{
	bool read = want_input(conn), write = !conn->lingering && !output_empty(conn);

	if (read != conn->reading) {
		if (read)
			event_add(&conn->read_event, NULL);
		else
			event_del(&conn->read_event);
		conn->reading = read;
	}
	if (write != conn->writing) {
		if (write)
			event_add(&conn->write_event, NULL);
		else
			event_del(&conn->write_event);
		conn->writing = write;
	}
}

/* The peer has ended its direction: what was asked completely may still be answered, all else is over. */
static void check_eof(struct http_connection *conn)
{
	if (!conn->eof || conn->broken)
		return;
	if (conn->req && !conn->req->finished)
		conn->broken = conn->req->body_complete || !conn->in;
	else if (!conn->req && !conn->in && output_empty(conn))
		conn->broken = true;
}

static void notify_drain(struct http_connection *conn)
{
	struct http_request *req = conn->req;

	if (req && req->want_drain && !req->finished && output_empty(conn)) {
		req->want_drain = false;
		if (req->on_drain)
			req->on_drain(req);
	}
}

/* One step; true when another may follow. */
static bool connection_step(struct http_connection *conn)
{
	bool more = feed_kept(conn);

	if (conn->refuse && !conn->closing)
		http_refuse(conn, conn->refuse);
	connection_flush(conn);
	notify_drain(conn);
	if (conn->broken)
		return false;
	if (conn->req && conn->req->finished && output_empty(conn)) {
		if (conn->req->body_complete)
			return request_done(conn);
		if (conn->discarded > HTTP_MAX_DISCARD || conn->eof) {
			request_close(conn);
			conn->closing = true;
			return false;
		}
	}
	return more;
}

static void connection_run(struct http_connection *conn)
{
	conn->scheduled = true; /* what handlers queue now is flushed below */
	do {
		while (connection_step(conn))
			;
		check_eof(conn);
	} while (!conn->broken && conn->in && parser_open(conn));
	conn->scheduled = false;

	if (!conn->broken && conn->closing && !conn->lingering && output_empty(conn)) {
		if (conn->eof)
			conn->broken = true;
		else
			start_linger(conn);
	}
	if (conn->broken || (conn->lingering && conn->eof))
		connection_free(conn);
	else
		update_events(conn);
}

void connection_schedule(struct http_connection *conn)
{
	if (conn->scheduled)
		return;
	conn->scheduled = true;
	event_active(&conn->run_event, EV_TIMEOUT, 0);
}

void connection_readable(struct http_connection *conn)
{
	bool scheduled = conn->scheduled;

	conn->scheduled = true;
	receive(conn);
	conn->scheduled = scheduled;
	connection_run(conn);
}

static void on_readable(evutil_socket_t fd, short what, void *arg)
{
	connection_readable(arg);
}

static void on_run(evutil_socket_t fd, short what, void *arg)
{
	connection_run(arg);
}

struct http_connection *connection_new(struct http_server *server, int fd, bool from_host)
{
	struct http_connection *conn = calloc(1, sizeof *conn);

	if (!conn || !(conn->out = evbuffer_new())) {
		free(conn);
		return NULL;
	}
	conn->server = server;
	conn->fd = fd;
	conn->file = -1;
	conn->from_host = from_host;
	conn->progress = http_now();
	event_assign(&conn->read_event, server->envd->base, fd, EV_READ | EV_PERSIST, on_readable, conn);
	event_assign(&conn->write_event, server->envd->base, fd, EV_WRITE | EV_PERSIST, on_run, conn);
	event_assign(&conn->run_event, server->envd->base, -1, 0, on_run, conn);
	http_parse_reset(conn);
	LIST_INSERT_HEAD(&server->connections, conn, link);
	server->n_connections++;
	return conn;
}

bool connection_overdue(const struct http_connection *conn, time_t now)
{
	time_t quiet = now - conn->progress;
	const struct http_request *req = conn->req;

	if (conn->lingering)
		return quiet >= HTTP_LINGER_SECONDS;
	if (conn->head)
		return now - conn->head_since >= HTTP_HEAD_SECONDS;
	if (!req)
		return quiet >= (output_empty(conn) ? HTTP_IDLE_SECONDS : HTTP_STALL_SECONDS);
	if (req->finished)
		return quiet >= HTTP_STALL_SECONDS;
	if (req->patient || quiet < HTTP_STALL_SECONDS)
		return false;
	return !output_empty(conn) || (!req->body_complete && !req->body_paused);
}
