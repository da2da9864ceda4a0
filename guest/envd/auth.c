#include "auth.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <nettle/memops.h>
#include <nettle/sha2.h>

#include "http.h"
#include "jsonx.h"

static bool equal(const char *a, const char *b)
{
	size_t len = strlen(a);

	return len == strlen(b) && memeql_sec(a, b, len);
}

bool auth_token_valid(const struct http_request *req)
{
	const char *given = http_header(req, "x-access-token");

	return !req->envd->token || (given && equal(given, req->envd->token));
}

char *auth_basic_user(const struct http_request *req)
{
	const char *value = http_header(req, "authorization");
	uint8_t *text;
	size_t len;

	if (!value || strncasecmp(value, "Basic ", 6) != 0)
		return NULL;
	value += 6;
	if (!base64_decode_text(value, strlen(value), &text, &len))
		return NULL;
	text[len] = 0; /* base64_decode_text leaves room for it */
	if (memchr(text, 0, len) || !memchr(text, ':', len)) {
		free(text);
		return NULL;
	}
	*strchr((char *)text, ':') = 0;
	return (char *)text;
}

/* ---- signatures: "v1_" + base64 without padding of sha256("path:operation:user:token[:expiration]") ---- */

static void add(struct sha256_ctx *hash, const char *text)
{
	sha256_update(hash, strlen(text), (const uint8_t *)text);
}

static bool signature_matches(const char *signature, const char *path, const char *operation, const char *username,
			      const char *token, const char *expiration)
{
	struct sha256_ctx hash;
	uint8_t digest[SHA256_DIGEST_SIZE];
	char *text;
	bool matches;

	sha256_init(&hash);
	add(&hash, path);
	add(&hash, ":");
	add(&hash, operation);
	add(&hash, ":");
	add(&hash, username);
	add(&hash, ":");
	add(&hash, token);
	if (expiration) {
		add(&hash, ":");
		add(&hash, expiration);
	}
	sha256_digest(&hash, sizeof digest, digest);
	text = base64_encode_text(digest, sizeof digest, false);
	matches = text && strncmp(signature, "v1_", 3) == 0 && equal(signature + 3, text);
	free(text);
	return matches;
}

static bool expired(const char *expiration)
{
	char *end;
	long long at;

	errno = 0;
	at = strtoll(expiration, &end, 10);
	return *end || errno || at < (long long)time(NULL);
}

bool auth_file_request(struct http_request *req, const char *path, const char *operation, const char *username)
{
	const char *token = req->envd->token, *given = http_header(req, "x-access-token");
	char *signature, *expiration;
	const char *problem = NULL;

	if (!token)
		return true;
	if (given) {
		if (equal(given, token))
			return true;
		http_reply_error(req, 401, AUTH_UNAUTHORIZED);
		return false;
	}
	signature = http_query(req, "signature");
	expiration = http_query(req, "signature_expiration");
	if (!signature)
		problem = "missing signature query parameter";
	else if (!signature_matches(signature, path, operation, username, token, expiration))
		problem = "invalid signature";
	else if (expiration && expired(expiration))
		problem = "signature is already expired";
	free(signature);
	free(expiration);
	if (problem)
		http_reply_error(req, 401, "%s", problem);
	return !problem;
}
