/* Connect protocol: unary calls, and what all kinds of calls share. Streams are in rpc_stream.c. */
#include "rpc.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "auth.h"
#include "http.h"
#include "rpc_internal.h"

static const struct {
	const char *name;
	int status;
} codes[] = {
	[RPC_OK] = {"ok", 200},
	[RPC_CANCELED] = {"canceled", 499},
	[RPC_UNKNOWN] = {"unknown", 500},
	[RPC_INVALID_ARGUMENT] = {"invalid_argument", 400},
	[RPC_DEADLINE_EXCEEDED] = {"deadline_exceeded", 504},
	[RPC_NOT_FOUND] = {"not_found", 404},
	[RPC_ALREADY_EXISTS] = {"already_exists", 409},
	[RPC_PERMISSION_DENIED] = {"permission_denied", 403},
	[RPC_RESOURCE_EXHAUSTED] = {"resource_exhausted", 429},
	[RPC_FAILED_PRECONDITION] = {"failed_precondition", 400},
	[RPC_ABORTED] = {"aborted", 409},
	[RPC_OUT_OF_RANGE] = {"out_of_range", 400},
	[RPC_UNIMPLEMENTED] = {"unimplemented", 501},
	[RPC_INTERNAL] = {"internal", 500},
	[RPC_UNAVAILABLE] = {"unavailable", 503},
	[RPC_DATA_LOSS] = {"data_loss", 500},
	[RPC_UNAUTHENTICATED] = {"unauthenticated", 401},
};

const char *rpc_code_name(enum rpc_code code)
{
	return codes[code].name;
}

int rpc_code_http_status(enum rpc_code code)
{
	return codes[code].status;
}

/* ---- failures ---- */

void rpc_call_init(struct rpc_call *call, struct http_request *req)
{
	memset(call, 0, sizeof *call);
	call->envd = req->envd;
	call->http = req;
}

void rpc_call_clear(struct rpc_call *call)
{
	free(call->message);
	call->message = NULL;
}

void rpc_vfail(struct rpc_call *call, enum rpc_code code, const char *format, va_list args)
{
	char message[1024];

	if (call->code != RPC_OK)
		return;
	vsnprintf(message, sizeof message, format, args);
	call->code = code;
	call->message = strdup(message);
}

void *rpc_fail(struct rpc_call *call, enum rpc_code code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	rpc_vfail(call, code, format, args);
	va_end(args);
	return NULL;
}

static enum rpc_code code_of_errno(int error)
{
	switch (error) {
	case ENOENT:
		return RPC_NOT_FOUND;
	case EACCES:
	case EPERM:
	case EROFS:
		return RPC_PERMISSION_DENIED;
	case EEXIST:
		return RPC_ALREADY_EXISTS;
	case ENOTDIR:
	case EISDIR:
	case EINVAL:
	case ENAMETOOLONG:
	case ELOOP:
		return RPC_INVALID_ARGUMENT;
	case ENOSPC:
	case EDQUOT:
	case EMFILE:
	case ENFILE:
		return RPC_RESOURCE_EXHAUSTED;
	default:
		return RPC_INTERNAL;
	}
}

void *rpc_fail_errno(struct rpc_call *call, int error, const char *format, ...)
{
	char message[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(message, sizeof message, format, args);
	va_end(args);
	return rpc_fail(call, code_of_errno(error), "%s: %s", message, strerror(error));
}

json_t *rpc_error_json(const struct rpc_call *call)
{
	enum rpc_code code = call->code == RPC_OK ? RPC_INTERNAL : call->code;
	json_t *message = call->message ? json_string(call->message) : NULL;

	if (!message) /* none, or not UTF-8 (part of a file name, say) */
		message = json_string(rpc_code_name(code));
	return json_pack("{s:s, s:o}", "code", rpc_code_name(code), "message", message);
}

bool rpc_user(struct rpc_call *call, struct user *user)
{
	char *named = auth_basic_user(call->http);
	const char *name = named && *named ? named : call->envd->default_user;
	bool found = user_lookup(name, user);

	if (!found)
		rpc_fail(call, RPC_UNAUTHENTICATED, "invalid username: '%s'", name);
	free(named);
	return found;
}

uint64_t rpc_timeout_ms(const struct rpc_call *call)
{
	const char *text = http_header(call->http, "connect-timeout-ms");
	uint64_t value;
	char *end;

	if (!text || *text < '0' || *text > '9' || strlen(text) > 10) /* the protocol's limit */
		return 0;
	value = strtoull(text, &end, 10);
	return *end ? 0 : value;
}

/* ---- checks before a call ---- */

bool rpc_type_is(const struct http_request *req, const char *wanted)
{
	const char *type = http_header(req, "content-type");
	size_t len = type ? strcspn(type, "; \t") : 0;

	return len == strlen(wanted) && strncasecmp(type, wanted, len) == 0;
}

bool rpc_encoding_plain(const struct http_request *req, const char *header)
{
	const char *encoding = http_header(req, header);

	return !encoding || !*encoding || strcasecmp(encoding, "identity") == 0;
}

void rpc_refuse_type(struct http_request *req, const char *accepted)
{
	http_add_header(req, "Accept-Post", accepted);
	http_reply_error(req, 415, "content type must be %s", accepted);
}

json_t *rpc_parse_message(struct rpc_call *call, const char *text, size_t len)
{
	json_error_t error;
	json_t *message = json_loadb(text, len, JSON_REJECT_DUPLICATES, &error);

	if (message && json_is_object(message))
		return message;
	if (message)
		rpc_fail(call, RPC_INVALID_ARGUMENT, "the message must be a JSON object");
	else
		rpc_fail(call, RPC_INVALID_ARGUMENT, "the message is not valid JSON: %s", error.text);
	json_decref(message);
	return NULL;
}

/* ---- unary ---- */

struct unary {
	struct rpc_call call; /* first: rpc_finish() finds the rest from it */
	char *body;
	size_t len, size;
};

static void send_answer(struct unary *unary, json_t *answer)
{
	struct rpc_call *call = &unary->call;

	if (answer) {
		http_reply_json(call->http, 200, answer);
		return;
	}
	http_reply_json(call->http, rpc_code_http_status(call->code == RPC_OK ? RPC_INTERNAL : call->code),
			rpc_error_json(call));
}

void *rpc_defer(struct rpc_call *call)
{
	call->deferred = true;
	return NULL;
}

void rpc_finish(struct rpc_call *call, json_t *answer)
{
	call->deferred = false;
	call->on_close = NULL;
	send_answer((struct unary *)call, answer);
}

static void unary_close(struct http_request *req)
{
	struct unary *unary = req->state;

	if (unary->call.on_close)
		unary->call.on_close(&unary->call);
	rpc_call_clear(&unary->call);
	free(unary->body);
	free(unary);
}

static bool unary_room(struct unary *unary, size_t more)
{
	size_t size = unary->size ? unary->size : 512;
	char *body;

	while (size < unary->len + more)
		size *= 2;
	body = size == unary->size ? unary->body : realloc(unary->body, size);
	if (!body)
		return false;
	unary->body = body;
	unary->size = size;
	return true;
}

static void unary_body(struct http_request *req, const char *data, size_t len)
{
	struct unary *unary = req->state;

	if (unary->len + len > RPC_MAX_MESSAGE)
		rpc_fail(&unary->call, RPC_RESOURCE_EXHAUSTED, "the message is larger than %u bytes", RPC_MAX_MESSAGE);
	else if (!unary_room(unary, len))
		rpc_fail(&unary->call, RPC_RESOURCE_EXHAUSTED, "out of memory");
	if (unary->call.code != RPC_OK) {
		send_answer(unary, NULL);
		return;
	}
	memcpy(unary->body + unary->len, data, len);
	unary->len += len;
}

static void unary_end(struct http_request *req)
{
	struct unary *unary = req->state;
	rpc_unary_fn handler = (rpc_unary_fn)http_route_data(req);
	json_t *request = rpc_parse_message(&unary->call, unary->body ? unary->body : "", unary->len);
	json_t *answer = request ? handler(&unary->call, request) : NULL;

	json_decref(request);
	free(unary->body);
	unary->body = NULL;
	if (!unary->call.deferred)
		send_answer(unary, answer);
}

static void unary_start(struct http_request *req)
{
	struct unary *unary;

	if (!rpc_type_is(req, "application/json")) {
		rpc_refuse_type(req, "application/json");
		return;
	}
	unary = calloc(1, sizeof *unary);
	if (!unary) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	rpc_call_init(&unary->call, req);
	req->state = unary;
	req->on_body = unary_body;
	req->on_end = unary_end;
	req->on_close = unary_close;
	if (!rpc_encoding_plain(req, "content-encoding"))
		rpc_fail(&unary->call, RPC_UNIMPLEMENTED, "compressed messages are not supported, only identity");
	else if (req->content_length > (int64_t)RPC_MAX_MESSAGE)
		rpc_fail(&unary->call, RPC_RESOURCE_EXHAUSTED, "the message is larger than %u bytes", RPC_MAX_MESSAGE);
	if (unary->call.code != RPC_OK)
		send_answer(unary, NULL);
}

void rpc_unary(struct envd *envd, const char *path, rpc_unary_fn handler)
{
	http_route_with(envd, "POST", path, HTTP_TOKEN, unary_start, (const void *)handler);
}
