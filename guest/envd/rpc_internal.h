/* What rpc.c and rpc_stream.c share. */
#ifndef ENVD_RPC_INTERNAL_H
#define ENVD_RPC_INTERNAL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include "rpc.h"

struct http_request;

void rpc_call_init(struct rpc_call *call, struct http_request *req);
void rpc_call_clear(struct rpc_call *call);
void rpc_vfail(struct rpc_call *call, enum rpc_code code, const char *format, va_list args);
json_t *rpc_error_json(const struct rpc_call *call); /* {"code", "message"} */
bool rpc_type_is(const struct http_request *req, const char *wanted);
bool rpc_encoding_plain(const struct http_request *req, const char *header);
void rpc_refuse_type(struct http_request *req, const char *accepted);
/* New reference to an object, or NULL after rpc_fail(invalid_argument). */
json_t *rpc_parse_message(struct rpc_call *call, const char *text, size_t len);

#endif
