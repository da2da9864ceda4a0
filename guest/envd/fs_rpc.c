/* filesystem.Filesystem: what clients ask about files, except their contents. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "entry.h"
#include "envd.h"
#include "jsonx.h"
#include "path.h"
#include "remove.h"
#include "rpc.h"
#include "watch.h"

/* One answer is built in memory: about 1 KiB an entry. */
#define LIST_ENTRIES_MAX 100000

/* The path in `field`, resolved for the user; false after rpc_fail(). */
static bool get_path(struct rpc_call *call, const json_t *request, const char *field, const struct user *user,
		     char out[PATH_MAX])
{
	const json_t *value = jx_get(request, field);

	if (value && !json_is_string(value)) {
		rpc_fail(call, RPC_INVALID_ARGUMENT, "%s must be a string", field);
		return false;
	}
	enum path_status status = path_resolve(value ? json_string_value(value) : "",
					       value ? json_string_length(value) : 0, user->home,
					       call->envd->default_workdir, out);
	if (status != PATH_OK)
		rpc_fail(call, RPC_INVALID_ARGUMENT, "%s: %s", field, path_status_text(status));
	return status == PATH_OK;
}

/* The call's user and the path in `field`. On success the caller ends with user_clear(). */
static bool begin(struct rpc_call *call, const json_t *request, const char *field, struct user *user,
		  char out[PATH_MAX])
{
	if (!rpc_user(call, user))
		return false;
	if (get_path(call, request, field, user, out))
		return true;
	user_clear(user);
	return false;
}

static json_t *entry_answer(struct rpc_call *call, const char *path)
{
	json_t *entry = entry_info(path);

	if (!entry)
		return rpc_fail_errno(call, errno, "%s", path);
	return json_pack("{s:o}", "entry", entry);
}

static json_t *stat_path(struct rpc_call *call, json_t *request)
{
	struct user user;
	char path[PATH_MAX];

	if (!begin(call, request, "path", &user, path))
		return NULL;
	user_clear(&user);
	return entry_answer(call, path);
}

static json_t *make_directory(struct rpc_call *call, const char *path, const struct user *user)
{
	struct stat st;

	if (stat(path, &st) == 0) {
		if (S_ISDIR(st.st_mode))
			return rpc_fail(call, RPC_ALREADY_EXISTS, "directory already exists: %s", path);
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "path already exists but it is not a directory: %s", path);
	}
	if (errno != ENOENT)
		return rpc_fail_errno(call, errno, "%s", path);
	if (path_make_directories(path, user->uid, user->gid) == 0)
		return entry_answer(call, path);
	if (errno == EEXIST)
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "path already exists but it is not a directory: %s", path);
	return rpc_fail_errno(call, errno, "%s", path);
}

static json_t *make_dir(struct rpc_call *call, json_t *request)
{
	struct user user;
	char path[PATH_MAX];

	if (!begin(call, request, "path", &user, path))
		return NULL;
	json_t *answer = make_directory(call, path, &user);
	user_clear(&user);
	return answer;
}

static json_t *move_entry(struct rpc_call *call, const char *source, const char *destination, const struct user *user)
{
	struct stat st;

	if (lstat(source, &st) != 0)
		return rpc_fail_errno(call, errno, "source: %s", source);
	if (path_make_parents(destination, user->uid, user->gid) != 0)
		return rpc_fail_errno(call, errno, "destination: %s", destination);
	if (rename(source, destination) == 0)
		return entry_answer(call, destination);
	switch (errno) {
	case EXDEV:
		return rpc_fail(call, RPC_FAILED_PRECONDITION,
				"source and destination are on different file systems: %s, %s", source, destination);
	case EISDIR:
	case ENOTEMPTY:
	case EEXIST:
		return rpc_fail(call, RPC_ALREADY_EXISTS, "destination already exists: %s", destination);
	default:
		return rpc_fail_errno(call, errno, "cannot move %s to %s", source, destination);
	}
}

static json_t *move(struct rpc_call *call, json_t *request)
{
	struct user user;
	char source[PATH_MAX], destination[PATH_MAX];
	json_t *answer = NULL;

	if (!begin(call, request, "source", &user, source))
		return NULL;
	if (get_path(call, request, "destination", &user, destination))
		answer = move_entry(call, source, destination, &user);
	user_clear(&user);
	return answer;
}

static json_t *remove_path(struct rpc_call *call, json_t *request)
{
	struct user user;
	char path[PATH_MAX];

	if (!begin(call, request, "path", &user, path))
		return NULL;
	user_clear(&user);
	/* An empty path means the work directory elsewhere; nobody who sends it here wants that removed. */
	if (json_string_length(jx_get(request, "path")) == 0 || strcmp(path, "/") == 0)
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "path must name something below the root directory");
	if (remove_all(path) != 0)
		return rpc_fail_errno(call, errno, "%s", path);
	return json_object();
}

/* The path of the walk is one buffer: a guest may nest directories as deep as PATH_MAX allows. */
struct listing {
	json_t *entries;
	const struct watchers *watchers; /* know the temporary files of uploads, which are not listed */
	struct entry_names names;
	char path[PATH_MAX];
};

static int not_dots(const struct dirent *entry)
{
	return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

static void free_names(struct dirent **names, int count)
{
	for (int i = 0; i < count; i++)
		free(names[i]);
	free(names);
}

/* False when the name does not fit; then nothing is appended. */
static bool append_name(struct listing *listing, size_t length, const char *name)
{
	const char *slash = length > 0 && listing->path[length - 1] == '/' ? "" : "/";

	if (length + strlen(slash) + strlen(name) >= sizeof listing->path)
		return false;
	sprintf(listing->path + length, "%s%s", slash, name);
	return true;
}

static int list_into(struct listing *listing, uint32_t depth);

/* What vanishes or cannot be read during the walk is left out; only the limit ends it. */
static int list_one(struct listing *listing, uint32_t depth)
{
	struct stat st;
	json_t *entry = entry_info_with(listing->path, &listing->names);

	if (!entry)
		return 0;
	json_array_append_new(listing->entries, entry);
	if (json_array_size(listing->entries) > LIST_ENTRIES_MAX) {
		errno = EFBIG;
		return -1;
	}
	if (depth <= 1 || lstat(listing->path, &st) != 0 || !S_ISDIR(st.st_mode))
		return 0;
	return list_into(listing, depth - 1) != 0 && errno == EFBIG ? -1 : 0;
}

/* Pre-order, by name. -1 with errno when the directory itself cannot be read. */
static int list_into(struct listing *listing, uint32_t depth)
{
	struct dirent **names;
	size_t length = strlen(listing->path);
	int count = scandir(listing->path, &names, not_dots, by_bytes), result = 0;

	if (count < 0)
		return -1;
	for (int i = 0; i < count && result == 0; i++) {
		if (!watchers_is_upload(listing->watchers, names[i]->d_name) &&
		    append_name(listing, length, names[i]->d_name))
			result = list_one(listing, depth);
		listing->path[length] = '\0';
	}
	int error = errno;
	free_names(names, count);
	errno = error;
	return result;
}

static json_t *list_directory(struct rpc_call *call, const char *path, uint32_t depth)
{
	struct listing listing = {.watchers = call->envd->watchers};
	struct stat st;

	if (stat(path, &st) != 0)
		return rpc_fail_errno(call, errno, "path not found: %s", path);
	if (!S_ISDIR(st.st_mode))
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "path is not a directory: %s", path);
	listing.entries = json_array();
	snprintf(listing.path, sizeof listing.path, "%s", path);
	if (list_into(&listing, depth ? depth : 1) == 0)
		return json_pack("{s:o}", "entries", listing.entries);
	json_decref(listing.entries);
	if (errno == EFBIG)
		return rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "more than %d entries: %s", LIST_ENTRIES_MAX, path);
	return rpc_fail_errno(call, errno, "%s", path);
}

static json_t *list_dir(struct rpc_call *call, json_t *request)
{
	struct user user;
	char path[PATH_MAX];
	uint32_t depth = 1;

	if (jx_u32(request, "depth", &depth) == JX_BAD)
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "depth must be a number from 0 to 4294967295");
	if (!begin(call, request, "path", &user, path))
		return NULL;
	user_clear(&user);
	return list_directory(call, path, depth);
}

/* Watchers */

static bool get_flag(struct rpc_call *call, const json_t *request, const char *field, bool *out)
{
	if (jx_bool(request, field, out) != JX_BAD)
		return true;
	rpc_fail(call, RPC_INVALID_ARGUMENT, "%s must be a boolean", field);
	return false;
}

static void fail_to_watch(struct rpc_call *call, int error, const char *path)
{
	switch (error) {
	case ENOENT:
		rpc_fail(call, RPC_NOT_FOUND, "path %s not found", path);
		break;
	case ENOTDIR:
		rpc_fail(call, RPC_INVALID_ARGUMENT, "path is not a directory: %s", path);
		break;
	case EREMOTE:
		rpc_fail(call, RPC_INVALID_ARGUMENT, "cannot watch path on a network mount: %s", path);
		break;
	case EMFILE:
		rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "more than %d watchers", WATCH_WATCHERS_MAX);
		break;
	case ENOSPC:
		rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "the limit of inotify watches is reached: %s", path);
		break;
	default:
		rpc_fail_errno(call, error, "%s", path);
	}
}

/* Opens the watcher that a WatchDirRequest or CreateWatcherRequest asks for; NULL after rpc_fail(). */
static struct watcher *open_watcher(struct rpc_call *call, const json_t *request,
				    void (*wake)(struct watcher *watcher, void *data), void *data)
{
	struct user user;
	char path[PATH_MAX];
	struct watch_options options = {.path = path};

	if (!get_flag(call, request, "recursive", &options.recursive) ||
	    !get_flag(call, request, "includeEntry", &options.include_entry) ||
	    !get_flag(call, request, "allowNetworkMounts", &options.allow_network_mounts) ||
	    !begin(call, request, "path", &user, path))
		return NULL;
	user_clear(&user);
	struct watcher *watcher = watcher_open(call->envd->watchers, &options, wake, data);
	if (!watcher)
		fail_to_watch(call, errno, path);
	return watcher;
}

static struct watcher *find_watcher(struct rpc_call *call, const json_t *request)
{
	const char *id = "";

	if (jx_string(request, "watcherId", &id) == JX_BAD) {
		rpc_fail(call, RPC_INVALID_ARGUMENT, "watcherId must be a string");
		return NULL;
	}
	struct watcher *watcher = watchers_find(call->envd->watchers, id);
	if (!watcher)
		rpc_fail(call, RPC_NOT_FOUND, "watcher with id %s not found", id);
	return watcher;
}

static json_t *create_watcher(struct rpc_call *call, json_t *request)
{
	struct watcher *watcher = open_watcher(call, request, NULL, NULL);

	return watcher ? json_pack("{s:s}", "watcherId", watcher_id(watcher)) : NULL;
}

static json_t *get_watcher_events(struct rpc_call *call, json_t *request)
{
	struct watcher *watcher = find_watcher(call, request);

	if (!watcher)
		return NULL;
	/* A client that has just made a change expects to find it here, before the loop comes to the inotify
	 * descriptor. */
	watchers_pump(call->envd->watchers);
	json_t *events = json_array();
	for (json_t *event; (event = watcher_next(watcher));)
		json_array_append_new(events, event);
	return json_pack("{s:o}", "events", events);
}

static json_t *remove_watcher(struct rpc_call *call, json_t *request)
{
	struct watcher *watcher = find_watcher(call, request);

	if (!watcher)
		return NULL;
	watcher_close(watcher);
	return json_object();
}

/* WatchDir: a watcher that lives as long as its stream. */
struct watch_stream {
	struct rpc_stream *stream;
	struct watcher *watcher;
	struct event *flush; /* sends from the loop, not from within the reading of inotify events */
};

static void flush_events(struct watch_stream *watch)
{
	while (!rpc_stream_full(watch->stream)) {
		json_t *event = watcher_next(watch->watcher);
		if (!event)
			return;
		rpc_stream_send(watch->stream, json_pack("{s:o}", "filesystem", event));
	}
}

static void on_flush(evutil_socket_t fd, short what, void *data)
{
	flush_events(data);
}

static void on_wake(struct watcher *watcher, void *data)
{
	struct watch_stream *watch = data;

	event_active(watch->flush, EV_TIMEOUT, 0);
}

static void watch_drained(struct rpc_stream *stream)
{
	flush_events(stream->state);
}

static void watch_closed(struct rpc_stream *stream)
{
	struct watch_stream *watch = stream->state;

	if (watch->watcher)
		watcher_close(watch->watcher);
	if (watch->flush)
		event_free(watch->flush);
	free(watch);
}

static void watch_dir(struct rpc_stream *stream, json_t *request)
{
	struct watch_stream *watch = calloc(1, sizeof *watch);

	if (!watch) {
		rpc_stream_fail(stream, RPC_RESOURCE_EXHAUSTED, "out of memory");
		return;
	}
	watch->stream = stream;
	stream->state = watch;
	stream->on_close = watch_closed;
	watch->flush = event_new(stream->call.envd->base, -1, 0, on_flush, watch);
	watch->watcher = watch->flush ? open_watcher(&stream->call, request, on_wake, watch) : NULL;
	if (!watch->watcher) {
		rpc_fail(&stream->call, RPC_RESOURCE_EXHAUSTED, "out of memory");
		rpc_stream_fail_call(stream);
		return;
	}
	stream->on_drain = watch_drained;
	rpc_stream_send(stream, json_pack("{s:{}}", "start"));
	rpc_stream_keepalive(stream, "{\"keepalive\":{}}");
}

void fs_register(struct envd *envd)
{
	envd->watchers = watchers_new(envd->base);
	if (!envd->watchers) {
		perror("envd: inotify");
		exit(EXIT_FAILURE);
	}
	rpc_unary(envd, "/filesystem.Filesystem/Stat", stat_path);
	rpc_unary(envd, "/filesystem.Filesystem/MakeDir", make_dir);
	rpc_unary(envd, "/filesystem.Filesystem/Move", move);
	rpc_unary(envd, "/filesystem.Filesystem/ListDir", list_dir);
	rpc_unary(envd, "/filesystem.Filesystem/Remove", remove_path);
	rpc_unary(envd, "/filesystem.Filesystem/CreateWatcher", create_watcher);
	rpc_unary(envd, "/filesystem.Filesystem/GetWatcherEvents", get_watcher_events);
	rpc_unary(envd, "/filesystem.Filesystem/RemoveWatcher", remove_watcher);
	rpc_server_stream(envd, "/filesystem.Filesystem/WatchDir", watch_dir);
}

void fs_unregister(struct envd *envd)
{
	watchers_free(envd->watchers);
	envd->watchers = NULL;
}
