/* Directory watchers on inotify.
 *
 * One inotify instance serves all watchers: the kernel allows few instances (128) but many watches. What happens is
 * queued per watcher, at most WATCH_QUEUE_MAX events; when nobody fetches them the oldest are dropped.
 */
#ifndef ENVD_WATCH_H
#define ENVD_WATCH_H

#include <stdbool.h>
#include <sys/types.h>
#include <event2/event.h>
#include <jansson.h>

#define WATCH_QUEUE_MAX 8192
/* Watchers that nobody removes stay for the agent's life, so their number is bounded. */
#define WATCH_WATCHERS_MAX 1024

struct watchers;
struct watcher;

struct watch_options {
	const char *path; /* absolute; may be a symbolic link to a directory */
	bool recursive;
	bool include_entry;
	bool allow_network_mounts;
};

struct watchers *watchers_new(struct event_base *base);
void watchers_free(struct watchers *all);

/* NULL with errno: ENOENT and others of lstat, ENOTDIR, EREMOTE for a network mount that is not allowed, EMFILE above
 * WATCH_WATCHERS_MAX, ENOSPC when the kernel grants no more watches. When it returns, everything that happens from now
 * on is seen. `wake` (may be NULL) is called when the queue stops being empty. */
struct watcher *watcher_open(struct watchers *all, const struct watch_options *options,
			     void (*wake)(struct watcher *watcher, void *data), void *data);
void watcher_close(struct watcher *watcher);

const char *watcher_id(const struct watcher *watcher);
struct watcher *watchers_find(struct watchers *all, const char *id);

/* Takes in what the kernel has queued up to this moment. */
void watchers_pump(struct watchers *all);

/* The oldest event as filesystem.FilesystemEvent, removed from the queue; NULL when the queue is empty. */
json_t *watcher_next(struct watcher *watcher);

/* An upload is written to a temporary file and renamed at its end. Watchers report it as one create (or none, when the
 * file was there before), one write and one chmod, as if it had been written in place. */
#define WATCH_UPLOAD_NAME_MAX 64
/* Name for the temporary file of an upload; `replaces` says whether the target exists. */
void watchers_upload_name(struct watchers *all, bool replaces, char out[WATCH_UPLOAD_NAME_MAX]);
/* True for such names. */
bool watchers_is_upload(const struct watchers *all, const char *name);

#endif
