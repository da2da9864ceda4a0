#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "auth.h"
#include "path.h"

bool files_user(struct http_request *req, const char *name, struct user *user)
{
	if (!name || !*name)
		name = req->envd->default_user;
	if (user_lookup(name, user))
		return true;
	http_reply_error(req, 401, "error looking up user '%s': user: unknown user %s", name, name);
	return false;
}

bool files_resolve(struct http_request *req, const struct user *user, const char *raw, size_t length,
		   char out[PATH_MAX])
{
	enum path_status status = path_resolve(raw, length, user->home, req->envd->default_workdir, out);

	if (status != PATH_OK)
		http_reply_error(req, 400, "path: %s", path_status_text(status));
	return status == PATH_OK;
}

/* True for a parameter that is in the query but could not be decoded: NUL or a broken escape. */
static bool is_malformed(const struct http_request *req, const char *name, const char *decoded)
{
	size_t length = strlen(name);

	for (const char *at = req->query; !decoded && *at; at += strcspn(at, "&"), at += *at == '&')
		if (strncmp(at, name, length) == 0 && (at[length] == '=' || at[length] == '&' || at[length] == '\0'))
			return true;
	return false;
}

bool files_begin(struct http_request *req, const char *operation, char **path, struct user *user)
{
	char *username = http_query(req, "username");
	bool accepted = false;

	*path = http_query(req, "path");
	if (is_malformed(req, "path", *path))
		http_reply_error(req, 400, "path contains a NUL byte or a malformed escape");
	else if (is_malformed(req, "username", username))
		http_reply_error(req, 400, "username contains a NUL byte or a malformed escape");
	else
		accepted = auth_file_request(req, *path ? *path : "", operation, username ? username : "") &&
			   files_user(req, username, user);
	free(username);
	if (!accepted) {
		free(*path);
		*path = NULL;
	}
	return accepted;
}

void files_reply_errno(struct http_request *req, int error, const char *path)
{
	switch (error) {
	case ENOENT:
		http_reply_error(req, 404, "path '%s' does not exist", path);
		break;
	case EISDIR:
		http_reply_error(req, 400, "path '%s' is a directory", path);
		break;
	case ENOTSUP:
		http_reply_error(req, 400, "path '%s' is not a regular file", path);
		break;
	case ENOTDIR:
	case ELOOP:
	case ENAMETOOLONG:
	case EINVAL:
		http_reply_error(req, 400, "path '%s': %s", path, strerror(error));
		break;
	case ENOSPC:
	case EDQUOT:
		http_reply_error(req, 507, "not enough disk space available for '%s'", path);
		break;
	default:
		http_reply_error(req, 500, "path '%s': %s", path, strerror(error));
	}
}

void files_next_turn(struct event *turn)
{
	static const struct timeval NOW = {0, 0};

	event_add(turn, &NOW);
}

void files_register(struct envd *envd)
{
	files_get_register(envd);
	files_post_register(envd);
	files_compose_register(envd);
}
