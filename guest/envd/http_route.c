/* Which handler answers a request, and who may ask. */
#include <stdlib.h>
#include <string.h>

#include "auth.h"
#include "http_internal.h"
#include "identity.h"

void http_route_with(struct envd *envd, const char *method, const char *path, unsigned flags, http_handler handler,
		     const void *data)
{
	struct http_server *server = envd->http;

	if (server->n_routes == HTTP_MAX_ROUTES)
		abort(); /* a mistake of ours: routes are fixed at build time */
	server->routes[server->n_routes++] = (struct route){method, path, flags, handler, data};
}

void http_route(struct envd *envd, const char *method, const char *path, unsigned flags, http_handler handler)
{
	http_route_with(envd, method, path, flags, handler, NULL);
}

const void *http_route_data(const struct http_request *req)
{
	return req->route->data;
}

static const struct route *find(const struct http_server *server, const struct http_request *req, bool *path_known)
{
	const char *method = req->head_only ? "GET" : req->method;
	size_t i;

	*path_known = false;
	for (i = 0; i < server->n_routes; i++) {
		const struct route *route = &server->routes[i];

		if (strcmp(route->path, req->path) != 0)
			continue;
		*path_known = true;
		if (strcmp(route->method, method) == 0)
			return route;
	}
	return NULL;
}

/* Cross-origin requests: any origin, all methods. "*" would not cover Authorization, so what is asked is named. */
static void answer_preflight(struct http_request *req)
{
	const char *headers = http_header(req, "access-control-request-headers");

	http_add_header(req, "Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
	if (headers)
		http_add_header(req, "Access-Control-Allow-Headers", headers);
	http_add_header(req, "Access-Control-Max-Age", "7200");
	http_reply(req, 204, NULL, NULL, 0);
}

static bool expects_continue(const struct http_request *req)
{
	return !req->http10 && req->content_length != 0 && http_header(req, "expect");
}

static void call(struct http_request *req)
{
	bool path_known;
	const struct route *route = find(req->conn->server, req, &path_known);
	unsigned flags = route ? route->flags : HTTP_TOKEN;

	if (strcmp(req->method, "OPTIONS") == 0) {
		answer_preflight(req);
	} else if ((flags & HTTP_HOST) && !req->conn->from_host) {
		http_reply_error(req, 403, "only the host may call this");
	} else if (flags == HTTP_TOKEN && !auth_token_valid(req)) {
		http_reply_error(req, 401, AUTH_UNAUTHORIZED);
	} else if (!route) {
		if (path_known)
			http_reply_error(req, 405, "method %s is not allowed here", req->method);
		else
			http_reply_error(req, 404, "there is nothing at this path");
	} else {
		req->route = route;
		if (!(flags & HTTP_EARLY))
			identity_write(req->envd->identity);
		route->handler(req);
	}
}

void http_dispatch(struct http_request *req)
{
	static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";

	call(req);
	if (!expects_continue(req))
		return;
	if (!req->finished)
		evbuffer_add(req->conn->out, go_on, sizeof go_on - 1);
}
