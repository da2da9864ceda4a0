/* What the handlers of /files share: who asks, for which path, and what an errno means to an HTTP client. */
#ifndef ENVD_FILES_H
#define ENVD_FILES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "http.h"
#include "users.h"

/* Checks token or signature (`operation` is "read" or "write") and finds the user that the query names. On success
 * *path is the `path` parameter, malloc'ed, NULL when absent, and the caller ends with user_clear(). False after an
 * answer was sent. */
bool files_begin(struct http_request *req, const char *operation, char **path, struct user *user);
/* The user by name, or the default user for NULL or ""; false after a 401. */
bool files_user(struct http_request *req, const char *name, struct user *user);
/* path_resolve() for a request; false after a 400. */
bool files_resolve(struct http_request *req, const struct user *user, const char *raw, size_t length,
		   char out[PATH_MAX]);
/* Answers with the status that suits an errno met at `path`. */
void files_reply_errno(struct http_request *req, int error, const char *path);

/* Runs a timer event after the other clients that wait now. (An event that activates itself would be run again before
 * libevent looks at any socket.) */
void files_next_turn(struct event *turn);

/* One for each source file. */
void files_get_register(struct envd *envd);
void files_post_register(struct envd *envd);
void files_compose_register(struct envd *envd);

#endif
