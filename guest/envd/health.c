/* GET /health and GET /envs. */
#include "env.h"
#include "http.h"

static void health(struct http_request *req)
{
	http_add_header(req, "Cache-Control", "no-store");
	http_reply(req, 204, NULL, NULL, 0);
}

static void envs(struct http_request *req)
{
	http_add_header(req, "Cache-Control", "no-store");
	http_reply_json(req, 200, env_shared(req->envd));
}

void health_register(struct envd *envd)
{
	http_route(envd, "GET", "/health", HTTP_PUBLIC, health);
	http_route(envd, "GET", "/envs", HTTP_TOKEN, envs);
}
