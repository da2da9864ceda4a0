/* Connect streams: server streams (one message in, many out) and client streams (many in, one out). */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <event2/event.h>

#include "http.h"
#include "rpc_internal.h"

#define STREAM_TYPE "application/connect+json"
enum { KEEPALIVE_DEFAULT_SECONDS = 90, KEEPALIVE_MAX_SECONDS = 24 * 3600 };

/* ---- what both kinds share ---- */

static bool accept_stream(struct http_request *req)
{
	if (rpc_type_is(req, STREAM_TYPE))
		return true;
	rpc_refuse_type(req, STREAM_TYPE);
	return false;
}

/* Streams report every failure in their last frame; the HTTP status is always 200. */
static void begin(struct http_request *req)
{
	if (!req->started)
		http_start(req, 200, STREAM_TYPE, -1);
}

static void send_frame(struct http_request *req, uint8_t flags, const char *text, size_t len)
{
	uint8_t head[FRAME_HEAD];

	begin(req);
	frame_head(head, flags, len);
	http_write2(req, head, sizeof head, text, len);
}

static void send_end(struct rpc_call *call)
{
	json_t *error = call->code == RPC_OK ? NULL : rpc_error_json(call);
	json_t *end = error ? json_pack("{s:o}", "error", error) : json_object();
	char *text = json_dumps(end, JSON_COMPACT);

	if (text) {
		send_frame(call->http, FRAME_END, text, strlen(text));
		http_end(call->http);
	} else {
		http_abort(call->http);
	}
	free(text);
	json_decref(end);
}

static void fail_frame(struct rpc_call *call, enum frame_status status)
{
	switch (status) {
	case FRAME_TOO_LARGE:
		rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "the message is larger than %u bytes", RPC_MAX_MESSAGE);
		break;
	case FRAME_NO_MEMORY:
		rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "out of memory");
		break;
	default:
		rpc_fail(call, RPC_INVALID_ARGUMENT, "protocol error: unknown or unsupported frame flags");
	}
}

/* ---- server streams ---- */

static void stop_keepalive(struct rpc_stream *stream)
{
	if (stream->keepalive)
		event_free(stream->keepalive);
	free(stream->keepalive_message);
	stream->keepalive = NULL;
	stream->keepalive_message = NULL;
}

static void finish(struct rpc_stream *stream)
{
	if (stream->ended)
		return;
	stream->ended = true;
	stop_keepalive(stream);
	send_end(&stream->call);
}

void rpc_stream_send_text(struct rpc_stream *stream, const char *json, size_t len)
{
	if (!stream->ended)
		send_frame(stream->call.http, 0, json, len);
}

void rpc_stream_send(struct rpc_stream *stream, json_t *message)
{
	char *text = json_dumps(message, JSON_COMPACT);

	json_decref(message);
	if (text)
		rpc_stream_send_text(stream, text, strlen(text));
	else
		rpc_stream_fail(stream, RPC_INTERNAL, "a message could not be encoded");
	free(text);
}

void rpc_stream_end(struct rpc_stream *stream)
{
	finish(stream);
}

void rpc_stream_fail(struct rpc_stream *stream, enum rpc_code code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	rpc_vfail(&stream->call, code, format, args);
	va_end(args);
	finish(stream);
}

void rpc_stream_fail_call(struct rpc_stream *stream)
{
	if (stream->call.code == RPC_OK)
		rpc_fail(&stream->call, RPC_INTERNAL, "unknown failure");
	finish(stream);
}

bool rpc_stream_full(const struct rpc_stream *stream)
{
	return http_pending(stream->call.http) > HTTP_HIGH_WATER;
}

size_t rpc_stream_pending(const struct rpc_stream *stream)
{
	return http_pending(stream->call.http);
}

static void on_keepalive(evutil_socket_t fd, short what, void *arg)
{
	struct rpc_stream *stream = arg;

	if (!rpc_stream_full(stream)) /* a reader that is behind gets data soon enough */
		rpc_stream_send_text(stream, stream->keepalive_message, strlen(stream->keepalive_message));
}

static time_t keepalive_seconds(const struct http_request *req)
{
	const char *text = http_header(req, "keepalive-ping-interval");
	char *end;
	unsigned long seconds;

	if (!text || *text < '0' || *text > '9')
		return KEEPALIVE_DEFAULT_SECONDS;
	seconds = strtoul(text, &end, 10);
	if (*end || seconds == 0 || seconds > KEEPALIVE_MAX_SECONDS)
		return KEEPALIVE_DEFAULT_SECONDS;
	return (time_t)seconds;
}

void rpc_stream_keepalive(struct rpc_stream *stream, const char *json)
{
	struct timeval interval = {keepalive_seconds(stream->call.http), 0};

	if (stream->ended || stream->keepalive)
		return;
	stream->keepalive_message = strdup(json);
	stream->keepalive = event_new(stream->call.envd->base, -1, EV_PERSIST, on_keepalive, stream);
	if (!stream->keepalive_message || !stream->keepalive)
		stop_keepalive(stream);
	else
		event_add(stream->keepalive, &interval);
}

static void stream_received(struct rpc_stream *stream)
{
	json_t *request = rpc_parse_message(&stream->call, stream->reader.data ? stream->reader.data : "",
					    stream->reader.len);

	stream->received = true;
	frame_next(&stream->reader);
	if (request)
		stream->handler(stream, request);
	else
		rpc_stream_fail_call(stream);
	json_decref(request);
}

/* The handler starts with the first complete message; clients keep the request open behind it for a while. */
static void stream_body(struct http_request *req, const char *data, size_t len)
{
	struct rpc_stream *stream = req->state;
	enum frame_status status;
	size_t taken;

	if (stream->ended)
		return;
	if (stream->received) {
		rpc_stream_fail(stream, RPC_INVALID_ARGUMENT, "protocol error: more than one request message");
		return;
	}
	status = frame_read(&stream->reader, data, len, &taken);
	if (status == FRAME_READY && taken < len && !(stream->reader.head[0] & FRAME_END)) {
		rpc_stream_fail(stream, RPC_INVALID_ARGUMENT, "protocol error: more than one request message");
	} else if (status == FRAME_READY && !(stream->reader.head[0] & FRAME_END)) {
		stream_received(stream);
	} else if (status != FRAME_MORE) {
		fail_frame(&stream->call, status);
		rpc_stream_fail_call(stream);
	}
}

static void stream_end(struct http_request *req)
{
	struct rpc_stream *stream = req->state;

	if (!stream->received)
		rpc_stream_fail(stream, RPC_INVALID_ARGUMENT, "protocol error: the request ended before its message");
}

static void stream_drain(struct http_request *req)
{
	struct rpc_stream *stream = req->state;

	if (!stream->ended && stream->on_drain)
		stream->on_drain(stream);
}

static void stream_close(struct http_request *req)
{
	struct rpc_stream *stream = req->state;

	stream->ended = true;
	stop_keepalive(stream);
	if (stream->on_close)
		stream->on_close(stream);
	frame_clear(&stream->reader);
	rpc_call_clear(&stream->call);
	free(stream);
}

static void stream_start(struct http_request *req)
{
	struct rpc_stream *stream;

	if (!accept_stream(req))
		return;
	stream = calloc(1, sizeof *stream);
	if (!stream) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	rpc_call_init(&stream->call, req);
	frame_init(&stream->reader, RPC_MAX_MESSAGE);
	stream->handler = (rpc_stream_fn)http_route_data(req);
	req->patient = true; /* a stream may be silent for as long as its process is */
	req->state = stream;
	req->on_body = stream_body;
	req->on_end = stream_end;
	req->on_drain = stream_drain;
	req->on_close = stream_close;
	if (!rpc_encoding_plain(req, "connect-content-encoding") || !rpc_encoding_plain(req, "content-encoding"))
		rpc_stream_fail(stream, RPC_UNIMPLEMENTED, "compressed messages are not supported, only identity");
}

void rpc_server_stream(struct envd *envd, const char *path, rpc_stream_fn handler)
{
	http_route_with(envd, "POST", path, HTTP_TOKEN, stream_start, (const void *)handler);
}

/* ---- client streams ---- */

static void upload_finish(struct rpc_upload *upload, json_t *answer)
{
	char *text = answer ? json_dumps(answer, JSON_COMPACT) : NULL;

	if (upload->ended) {
		free(text);
		json_decref(answer);
		return;
	}
	upload->ended = true;
	if (text)
		send_frame(upload->call.http, 0, text, strlen(text));
	else
		rpc_fail(&upload->call, RPC_INTERNAL, "no answer");
	send_end(&upload->call);
	free(text);
	json_decref(answer);
}

static bool upload_message(struct rpc_upload *upload)
{
	json_t *message;
	bool fine;

	message = rpc_parse_message(&upload->call, upload->reader.data ? upload->reader.data : "", upload->reader.len);
	frame_next(&upload->reader);
	fine = message && upload->handlers->on_message(upload, message);
	json_decref(message);
	return fine;
}

/* One piece of input may hold many messages: a pause asked for within it takes effect behind it, so what a pause
 * must hold back is bounded by one read (64 KiB) and one message. */
static void upload_body(struct http_request *req, const char *data, size_t len)
{
	struct rpc_upload *upload = req->state;

	while (len > 0 && !upload->ended) {
		size_t taken;
		enum frame_status status = frame_read(&upload->reader, data, len, &taken);

		data += taken;
		len -= taken;
		if (status == FRAME_MORE)
			return;
		if (status == FRAME_READY && upload_message(upload))
			continue;
		if (status != FRAME_READY)
			fail_frame(&upload->call, status);
		upload_finish(upload, NULL);
	}
}

static void upload_end(struct http_request *req)
{
	struct rpc_upload *upload = req->state;

	if (!frame_idle(&upload->reader)) {
		rpc_fail(&upload->call, RPC_INVALID_ARGUMENT, "protocol error: the request ended within a message");
		upload_finish(upload, NULL);
	} else if (!upload->ended) {
		upload_finish(upload, upload->handlers->on_done(upload));
	}
}

static void upload_close(struct http_request *req)
{
	struct rpc_upload *upload = req->state;

	upload->ended = true;
	if (upload->handlers->on_close)
		upload->handlers->on_close(upload);
	frame_clear(&upload->reader);
	rpc_call_clear(&upload->call);
	free(upload);
}

static void upload_start(struct http_request *req)
{
	struct rpc_upload *upload;

	if (!accept_stream(req))
		return;
	upload = calloc(1, sizeof *upload);
	if (!upload) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	rpc_call_init(&upload->call, req);
	frame_init(&upload->reader, RPC_MAX_MESSAGE);
	upload->handlers = http_route_data(req);
	req->patient = true; /* input comes when a person types it */
	req->state = upload;
	req->on_body = upload_body;
	req->on_end = upload_end;
	req->on_close = upload_close;
	if (!rpc_encoding_plain(req, "connect-content-encoding") || !rpc_encoding_plain(req, "content-encoding")) {
		rpc_fail(&upload->call, RPC_UNIMPLEMENTED, "compressed messages are not supported, only identity");
		upload_finish(upload, NULL);
	}
}

void rpc_client_stream(struct envd *envd, const char *path, const struct rpc_upload_handlers *handlers)
{
	http_route_with(envd, "POST", path, HTTP_TOKEN, upload_start, handlers);
}

void rpc_upload_pause(struct rpc_upload *upload)
{
	http_pause_body(upload->call.http);
}

void rpc_upload_resume(struct rpc_upload *upload)
{
	http_resume_body(upload->call.http);
}
