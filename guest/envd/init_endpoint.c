/* POST /init: the host tells a new or restored guest who and when it is. Everything is checked before anything is
 * changed. A timestamp older than that of the last call means a late, repeated request: it is ignored.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "env.h"
#include "http.h"
#include "identity.h"
#include "init_system.h"
#include "jsonx.h"

enum {
	MAX_BODY = 4 << 20,
	MAX_HOST_NAME = 64, /* of Linux */
};

struct init {
	json_t *env_vars;
	const char *token, *user, *workdir, *timestamp, *hostname, *machine_id, *sandbox_id, *template_id;
	int64_t ns;
	uint8_t *entropy;
	size_t entropy_len;
};

struct body {
	char *text;
	size_t len;
};

/* ---- RFC 3339 ---- */

static bool digits(const char **at, int n, long *out)
{
	*out = 0;
	while (n-- > 0) {
		if (!isdigit((unsigned char)**at))
			return false;
		*out = *out * 10 + (*(*at)++ - '0');
	}
	return true;
}

static bool character(const char **at, char c)
{
	if (toupper((unsigned char)**at) != c)
		return false;
	(*at)++;
	return true;
}

/* Nanoseconds since 1970 of "2026-01-31T10:20:30.123456789Z" or with "+02:00". */
static bool parse_time(const char *at, int64_t *ns)
{
	long year, month, day, hour, minute, second, fraction = 0, off_hour = 0, off_minute = 0, scale = 1000000000;
	struct tm parts = {0};
	int sign = 0;

	if (!digits(&at, 4, &year) || !character(&at, '-') || !digits(&at, 2, &month) || !character(&at, '-') ||
	    !digits(&at, 2, &day) || !(character(&at, 'T') || character(&at, ' ')) || !digits(&at, 2, &hour) ||
	    !character(&at, ':') || !digits(&at, 2, &minute) || !character(&at, ':') || !digits(&at, 2, &second))
		return false;
	if (character(&at, '.')) {
		if (!isdigit((unsigned char)*at))
			return false;
		for (; isdigit((unsigned char)*at); at++)
			if (scale > 1)
				fraction += (*at - '0') * (scale /= 10);
	}
	if (!character(&at, 'Z')) {
		sign = *at == '+' ? 1 : *at == '-' ? -1 : 0;
		at++;
		if (!sign || !digits(&at, 2, &off_hour) || !character(&at, ':') || !digits(&at, 2, &off_minute))
			return false;
	}
	if (*at || year < 1970 || month < 1 || month > 12 || day < 1 || day > 31 || hour > 23 || minute > 59 ||
	    second > 60 || year > 2261)
		return false;
	parts = (struct tm){.tm_year = (int)year - 1900, .tm_mon = (int)month - 1, .tm_mday = (int)day,
			    .tm_hour = (int)hour, .tm_min = (int)minute, .tm_sec = (int)second};
	*ns = ((int64_t)timegm(&parts) - sign * (off_hour * 3600 + off_minute * 60)) * 1000000000 + fraction;
	return true;
}

/* ---- reading the request ---- */

static bool is_host_name(const char *text)
{
	size_t len = strlen(text);

	return len > 0 && len <= MAX_HOST_NAME && text[0] != '-' && text[0] != '.' &&
	       strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.") == len;
}

static bool is_machine_id(const char *text)
{
	return strlen(text) == 32 && strspn(text, "0123456789abcdef") == 32;
}

/* NULL, or what is wrong. */
static const char *parse_own(const json_t *object, struct init *init)
{
	if (jx_string(object, "hostname", &init->hostname) == JX_BAD || (init->hostname && !is_host_name(init->hostname)))
		return "hostname: must be a host name of at most 64 characters";
	if (jx_string(object, "machineId", &init->machine_id) == JX_BAD ||
	    (init->machine_id && !is_machine_id(init->machine_id)))
		return "machineId: must be 32 lower-case hex digits";
	if (jx_string(object, "sandboxId", &init->sandbox_id) == JX_BAD)
		return "sandboxId: must be a string";
	if (jx_string(object, "templateId", &init->template_id) == JX_BAD)
		return "templateId: must be a string";
	if (jx_bytes(object, "entropy", &init->entropy, &init->entropy_len) == JX_BAD ||
	    init->entropy_len > SYSTEM_MAX_ENTROPY)
		return "entropy: must be base64 of at most 512 bytes";
	return NULL;
}

static const char *parse(const json_t *object, struct init *init)
{
	json_t *ignored;

	if (!json_is_object(object))
		return "the body must be a JSON object";
	if (jx_object(object, "envVars", &init->env_vars) == JX_BAD || (init->env_vars && !env_valid(init->env_vars)))
		return "envVars: must map names (not empty, without '=') to strings";
	if (jx_string(object, "accessToken", &init->token) == JX_BAD)
		return "accessToken: must be a string";
	if (jx_string(object, "defaultUser", &init->user) == JX_BAD)
		return "defaultUser: must be a string";
	if (jx_string(object, "defaultWorkdir", &init->workdir) == JX_BAD)
		return "defaultWorkdir: must be a string";
	if (jx_string(object, "timestamp", &init->timestamp) == JX_BAD ||
	    (init->timestamp && !parse_time(init->timestamp, &init->ns)))
		return "timestamp: must be an RFC 3339 time";
	if (jx_array(object, "volumeMounts", &ignored) == JX_BAD)
		return "volumeMounts: must be a list";
	return parse_own(object, init);
}

/* ---- applying it ---- */

static void replace(char **where, const char *text)
{
	free(*where);
	*where = text && *text ? strdup(text) : NULL;
}

static void apply_system(const struct init *init)
{
	if (init->entropy_len > 0)
		system_add_entropy(init->entropy, init->entropy_len);
	if (init->timestamp)
		system_set_clock(init->ns);
	if (init->hostname)
		system_set_hostname(init->hostname);
}

static void apply(struct envd *envd, const struct init *init)
{
	if (init->timestamp)
		envd->init_ns = init->ns;
	if (init->env_vars) {
		json_decref(envd->env_vars);
		envd->env_vars = json_deep_copy(init->env_vars);
	}
	replace(&envd->token, init->token);
	if (init->user && *init->user)
		replace(&envd->default_user, init->user);
	if (init->workdir)
		replace(&envd->default_workdir, init->workdir);
	if (init->sandbox_id)
		replace(&envd->sandbox_id, init->sandbox_id);
	if (init->template_id)
		replace(&envd->template_id, init->template_id);
}

/* ---- HTTP ---- */

static void on_body(struct http_request *req, const char *data, size_t len)
{
	struct body *body = req->state;
	char *text;

	if (body->len + len > MAX_BODY) {
		http_reply_error(req, 413, "the body is larger than 4 MiB");
		return;
	}
	text = realloc(body->text, body->len + len);
	if (!text) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	memcpy(text + body->len, data, len);
	body->text = text;
	body->len += len;
}

static void on_end(struct http_request *req)
{
	struct body *body = req->state;
	struct init init = {0};
	json_error_t error;
	/* No body at all is an empty request: it only asks whether we are there. */
	json_t *object = body->len == 0 ? json_object()
					: json_loadb(body->text, body->len, JSON_REJECT_DUPLICATES, &error);
	const char *problem = object ? parse(object, &init) : "the body is not valid JSON";

	if (problem) {
		http_reply_error(req, 400, "%s", problem);
	} else {
		bool stale = init.timestamp && init.ns < req->envd->init_ns;

		if (!stale && body->len > 0) {
			apply(req->envd, &init);
			if (!req->envd->no_system) {
				apply_system(&init);
				identity_set(req->envd->identity, init.hostname, init.machine_id);
			}
		}
		http_add_header(req, "Cache-Control", "no-store");
		http_add_header(req, "X-Envd-Version", ENVD_VERSION);
		http_reply(req, 204, NULL, NULL, 0);
	}
	free(init.entropy);
	json_decref(object);
}

static void on_close(struct http_request *req)
{
	struct body *body = req->state;

	free(body->text);
	free(body);
}

static void init(struct http_request *req)
{
	req->state = calloc(1, sizeof(struct body));
	if (!req->state) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	req->on_body = on_body;
	req->on_end = on_end;
	req->on_close = on_close;
}

void init_register(struct envd *envd)
{
	http_route(envd, "POST", "/init", HTTP_HOST | HTTP_EARLY, init);
}
