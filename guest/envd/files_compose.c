/* POST /files/compose: one file made of several, which are then removed.
 *
 * The bytes are moved in the kernel, TURN bytes before other clients get their turn. The destination appears whole, and
 * no source is removed before that.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entry.h"
#include "files.h"
#include "jsonx.h"
#include "upload.h"

#define TURN (1 << 20)
#define BODY_MAX (1 << 20)
#define SOURCES_MAX 4096

struct compose {
	struct http_request *req;
	char *body;
	size_t body_length;
	char **sources;
	size_t n_sources;
	size_t next; /* source to open next */
	int fd;	     /* source being copied, or -1 */
	struct upload *upload;
	struct event *turn;
	bool failed;
};

static void fail_errno(struct compose *compose, int error, const char *path)
{
	compose->failed = true;
	files_reply_errno(compose->req, error, path);
}

static void finish(struct compose *compose)
{
	const char *destination = upload_path(compose->upload);

	if (upload_finish(compose->upload) != 0 || upload_commit(compose->upload) != 0) {
		fail_errno(compose, errno, destination);
		return;
	}
	for (size_t i = 0; i < compose->n_sources; i++)
		if (strcmp(compose->sources[i], destination) != 0 && unlink(compose->sources[i]) != 0 &&
		    errno != ENOENT) {
			fail_errno(compose, errno, compose->sources[i]);
			return;
		}
	json_t *entry = entry_info(destination);
	if (entry)
		http_reply_json(compose->req, 200, entry);
	else
		fail_errno(compose, errno, destination);
}

static bool next_source(struct compose *compose)
{
	const char *path = compose->sources[compose->next];
	struct stat st;

	compose->fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (compose->fd >= 0 && fstat(compose->fd, &st) == 0 && S_ISREG(st.st_mode)) {
		compose->next++;
		return true;
	}
	fail_errno(compose, compose->fd < 0 ? errno : ENOTSUP, path);
	return false;
}

static void on_turn(evutil_socket_t fd, short what, void *data)
{
	struct compose *compose = data;
	ssize_t copied;

	if (compose->failed)
		return;
	if (compose->fd < 0) {
		if (compose->next == compose->n_sources) {
			finish(compose);
			return;
		}
		if (!next_source(compose))
			return;
	}
	copied = sendfile(upload_descriptor(compose->upload), compose->fd, NULL, TURN);
	if (copied < 0 && errno != EINTR) {
		fail_errno(compose, errno, upload_path(compose->upload));
		return;
	}
	if (copied == 0) {
		close(compose->fd);
		compose->fd = -1;
	}
	files_next_turn(compose->turn);
}

/* Request */

static bool check_source(struct compose *compose, const char *path)
{
	struct stat st;

	if (stat(path, &st) != 0) {
		fail_errno(compose, errno, path);
		return false;
	}
	if (!S_ISREG(st.st_mode)) {
		fail_errno(compose, S_ISDIR(st.st_mode) ? EISDIR : ENOTSUP, path);
		return false;
	}
	for (size_t i = 0; i < compose->n_sources; i++)
		if (strcmp(compose->sources[i], path) == 0) {
			http_reply_error(compose->req, 400, "source_paths names '%s' twice", path);
			return false;
		}
	return true;
}

static bool add_source(struct compose *compose, const struct user *user, const json_t *value)
{
	char path[PATH_MAX];

	if (!json_is_string(value)) {
		http_reply_error(compose->req, 400, "source_paths must be an array of strings");
		return false;
	}
	if (!files_resolve(compose->req, user, json_string_value(value), json_string_length(value), path) ||
	    !check_source(compose, path))
		return false;
	compose->sources[compose->n_sources] = strdup(path);
	return compose->sources[compose->n_sources++] != NULL;
}

static bool take_sources(struct compose *compose, const struct user *user, const json_t *request)
{
	const json_t *values = json_object_get(request, "source_paths");
	size_t count = json_array_size(values);

	if (!json_is_array(values) || count == 0 || count > SOURCES_MAX) {
		http_reply_error(compose->req, 400, "source_paths must be an array of 1 to %d strings", SOURCES_MAX);
		return false;
	}
	compose->sources = calloc(count, sizeof *compose->sources);
	for (size_t i = 0; i < count; i++)
		if (!compose->sources || !add_source(compose, user, json_array_get(values, i)))
			return false;
	return true;
}

static bool open_destination(struct compose *compose, const struct user *user, const json_t *request)
{
	const json_t *value = json_object_get(request, "destination");
	char path[PATH_MAX];

	if (!json_is_string(value) || json_string_length(value) == 0) {
		http_reply_error(compose->req, 400, "destination must be a string");
		return false;
	}
	if (!files_resolve(compose->req, user, json_string_value(value), json_string_length(value), path))
		return false;
	struct upload_options options = {
		.watchers = compose->req->envd->watchers,
		.path = path,
		.uid = user->uid,
		.gid = user->gid,
	};
	compose->upload = upload_open(&options);
	if (!compose->upload)
		fail_errno(compose, errno, path);
	return compose->upload != NULL;
}

static void begin(struct compose *compose, const json_t *request)
{
	const json_t *name = json_object_get(request, "username");
	struct user user;

	if (name && !json_is_null(name) && !json_is_string(name)) {
		http_reply_error(compose->req, 400, "username must be a string");
		return;
	}
	if (!files_user(compose->req, json_string_value(name), &user))
		return;
	if (take_sources(compose, &user, request) && open_destination(compose, &user, request)) {
		compose->turn = event_new(compose->req->envd->base, -1, 0, on_turn, compose);
		if (compose->turn)
			files_next_turn(compose->turn);
		else
			http_reply_error(compose->req, 503, "out of memory");
	}
	user_clear(&user);
}

static void on_end(struct http_request *req)
{
	struct compose *compose = req->state;
	json_t *request = json_loadb(compose->body, compose->body_length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL,
				     NULL);

	if (json_is_object(request))
		begin(compose, request);
	else
		http_reply_error(req, 400, "body must be a JSON object");
	json_decref(request);
}

static void on_body(struct http_request *req, const char *data, size_t length)
{
	struct compose *compose = req->state;
	char *body = compose->body_length + length > BODY_MAX ? NULL
							      : realloc(compose->body, compose->body_length + length);

	if (!body) {
		http_reply_error(req, 413, "body is larger than %d bytes", BODY_MAX);
		return;
	}
	compose->body = body;
	memcpy(body + compose->body_length, data, length);
	compose->body_length += length;
}

static void on_close(struct http_request *req)
{
	struct compose *compose = req->state;

	if (compose->upload)
		upload_free(compose->upload);
	if (compose->turn)
		event_free(compose->turn);
	if (compose->fd >= 0)
		close(compose->fd);
	for (size_t i = 0; i < compose->n_sources; i++)
		free(compose->sources[i]);
	free(compose->sources);
	free(compose->body);
	free(compose);
}

static void handle_compose(struct http_request *req)
{
	struct compose *compose = calloc(1, sizeof *compose);

	if (!compose) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	compose->req = req;
	compose->fd = -1;
	req->state = compose;
	req->on_body = on_body;
	req->on_end = on_end;
	req->on_close = on_close;
}

void files_compose_register(struct envd *envd)
{
	http_route(envd, "POST", "/files/compose", HTTP_TOKEN, handle_compose);
}
