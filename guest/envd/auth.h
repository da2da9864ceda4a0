/* Access token and file signatures. */
#ifndef ENVD_AUTH_H
#define ENVD_AUTH_H

#include <stdbool.h>

#include "envd.h"

struct http_request;

#define AUTH_UNAUTHORIZED \
	"unauthorized access, please provide a valid access token or method signing if supported"

/* True when no token is set, or X-Access-Token equals it (compared in constant time). */
bool auth_token_valid(const struct http_request *req);
/* For /files: the token, or the query parameters `signature` (and `signature_expiration`, unix seconds) for
 * path:operation:username, where operation is "read" or "write", path the `path` parameter as sent (decoded) or "",
 * username the parameter or "". False after a 401 was sent. */
bool auth_file_request(struct http_request *req, const char *path, const char *operation, const char *username);
/* User name of `Authorization: Basic`, malloc'ed; NULL when the header is absent or not readable. */
char *auth_basic_user(const struct http_request *req);

#endif
