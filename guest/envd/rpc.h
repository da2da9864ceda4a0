/* Connect protocol (connectrpc.com) over http.h, JSON codec only, no compression.
 *
 * The protocol: POST /<service>/<method>. Unary: application/json both ways, errors are an HTTP status with
 * {"code","message"}. Streams: application/connect+json; frames of 1 flag byte, 4 bytes big-endian length, JSON;
 * always status 200; the last frame has flag 0x02 and holds {} or {"error": {...}}.
 */
#ifndef ENVD_RPC_H
#define ENVD_RPC_H

#include <stdint.h>
#include <jansson.h>

#include "envd.h"
#include "frame.h"
#include "users.h"

struct http_request;

#define RPC_MAX_MESSAGE (4u << 20) /* bytes of one request message */

enum rpc_code {
	RPC_OK = 0,
	RPC_CANCELED,
	RPC_UNKNOWN,
	RPC_INVALID_ARGUMENT,
	RPC_DEADLINE_EXCEEDED,
	RPC_NOT_FOUND,
	RPC_ALREADY_EXISTS,
	RPC_PERMISSION_DENIED,
	RPC_RESOURCE_EXHAUSTED,
	RPC_FAILED_PRECONDITION,
	RPC_ABORTED,
	RPC_OUT_OF_RANGE,
	RPC_UNIMPLEMENTED,
	RPC_INTERNAL,
	RPC_UNAVAILABLE,
	RPC_DATA_LOSS,
	RPC_UNAUTHENTICATED,
};
const char *rpc_code_name(enum rpc_code code); /* "not_found" */
int rpc_code_http_status(enum rpc_code code);

struct rpc_call {
	struct envd *envd;
	struct http_request *http;
	enum rpc_code code;   /* set by rpc_fail() */
	char *message;
	/* For a unary call that is answered later, see rpc_defer(). */
	bool deferred;
	void *state;
	void (*on_close)(struct rpc_call *call);
};

/* A unary handler returns a new reference to the answer, or NULL after rpc_fail(). `request` is an object; it is
 * borrowed. The call is over when the handler returns, unless it returns rpc_defer(): then rpc_finish() follows, or
 * on_close when the client has gone before. */
typedef json_t *(*rpc_unary_fn)(struct rpc_call *call, json_t *request);
void rpc_unary(struct envd *envd, const char *path, rpc_unary_fn handler);
/* Always returns NULL, so that `return rpc_fail(...)` ends a handler. The first failure of a call stays. */
void *rpc_fail(struct rpc_call *call, enum rpc_code code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void *rpc_defer(struct rpc_call *call); /* always returns NULL */
/* Answers a deferred call: takes the reference of `answer`; NULL after rpc_fail(). The call is gone afterwards. */
void rpc_finish(struct rpc_call *call, json_t *answer);
/* As rpc_fail with the code that suits `error` (an errno): ENOENT not_found, EACCES/EPERM permission_denied, EEXIST
 * already_exists, ENOTDIR/EINVAL/ENAMETOOLONG/ELOOP invalid_argument, ENOSPC/EDQUOT resource_exhausted, else internal.
 * The message is "<what>: <strerror>". */
void *rpc_fail_errno(struct rpc_call *call, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The user named by `Authorization: Basic`, else the default user. False after rpc_fail(unauthenticated). On success
 * the caller ends with user_clear(). */
bool rpc_user(struct rpc_call *call, struct user *user);

/* Server stream. The handler gets the one request message and may fail by rpc_stream_fail() at once. The stream is
 * valid until on_close has been called; after rpc_stream_end/fail on_close follows from the event loop. */
struct rpc_stream;
typedef void (*rpc_stream_fn)(struct rpc_stream *stream, json_t *request);
struct rpc_stream {
	struct rpc_call call;       /* rpc_user(&stream->call, ...) works here; a failure is passed on by
				     * rpc_stream_fail_call() */
	void *state;
	void (*on_drain)(struct rpc_stream *stream); /* output queue is empty again after rpc_stream_full() was true */
	void (*on_close)(struct rpc_stream *stream); /* last call: client gone, or the end was sent */
	/* rpc.c only */
	rpc_stream_fn handler;
	struct event *keepalive;
	char *keepalive_message;
	struct frame_reader reader;
	bool received, ended;
};
void rpc_server_stream(struct envd *envd, const char *path, rpc_stream_fn handler);
/* Milliseconds of Connect-Timeout-Ms; 0: none. */
uint64_t rpc_timeout_ms(const struct rpc_call *call);
void rpc_stream_send(struct rpc_stream *stream, json_t *message); /* takes the reference; flushed at once */
void rpc_stream_send_text(struct rpc_stream *stream, const char *json, size_t len);
void rpc_stream_end(struct rpc_stream *stream);
void rpc_stream_fail(struct rpc_stream *stream, enum rpc_code code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void rpc_stream_fail_call(struct rpc_stream *stream); /* ends with the failure kept in stream->call */
/* Sends `json` every Keepalive-Ping-Interval seconds (request header; default 90) until the stream ends. */
void rpc_stream_keepalive(struct rpc_stream *stream, const char *json);
/* True when more than HTTP_HIGH_WATER bytes wait for a slow reader; on_drain follows. */
bool rpc_stream_full(const struct rpc_stream *stream);
size_t rpc_stream_pending(const struct rpc_stream *stream); /* bytes that wait for the reader */

/* Client stream: on_message for each message; then on_done, whose answer (new reference) is sent, or NULL after
 * rpc_fail(). on_message returning false ends the call with the failure of rpc_fail(). */
struct rpc_upload;
struct rpc_upload_handlers {
	bool (*on_message)(struct rpc_upload *upload, json_t *message);
	json_t *(*on_done)(struct rpc_upload *upload);
	void (*on_close)(struct rpc_upload *upload);
};
struct rpc_upload {
	struct rpc_call call;
	void *state;
	/* rpc.c only */
	const struct rpc_upload_handlers *handlers;
	struct frame_reader reader;
	bool ended;
};
void rpc_client_stream(struct envd *envd, const char *path, const struct rpc_upload_handlers *handlers);
void rpc_upload_pause(struct rpc_upload *upload);
void rpc_upload_resume(struct rpc_upload *upload);

#endif
