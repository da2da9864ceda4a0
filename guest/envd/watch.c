#define _GNU_SOURCE
#include "watch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entry.h"
#include "path.h"
#include "watch_tree.h"

#define READ_ROUNDS 64 /* of one buffer each, before other clients get their turn */
#define UPLOAD_PREFIX ".envd-"

static const char *const CHANGE_NAMES[] = {
	[CHANGE_CREATE] = "EVENT_TYPE_CREATE", [CHANGE_WRITE] = "EVENT_TYPE_WRITE",
	[CHANGE_REMOVE] = "EVENT_TYPE_REMOVE", [CHANGE_RENAME] = "EVENT_TYPE_RENAME",
	[CHANGE_CHMOD] = "EVENT_TYPE_CHMOD",
};

static void drop_oldest(struct watcher *watcher)
{
	struct change_event *event = TAILQ_FIRST(&watcher->queue);

	TAILQ_REMOVE(&watcher->queue, event, link);
	watcher->queued--;
	free(event);
}

void watch_push(struct watcher *watcher, enum change change, const char *relative, const char *name)
{
	struct change_event *last = TAILQ_LAST(&watcher->queue, change_queue);
	size_t length = strlen(relative) + strlen(name) + 2;
	struct change_event *event = malloc(sizeof *event + length);

	if (!event)
		return;
	event->change = change;
	snprintf(event->name, length, "%s%s%s", relative, *relative ? "/" : "", name);
	if (last && last->change == change && strcmp(last->name, event->name) == 0) {
		free(event);
		return;
	}
	if (watcher->queued == WATCH_QUEUE_MAX)
		drop_oldest(watcher);
	TAILQ_INSERT_TAIL(&watcher->queue, event, link);
	if (++watcher->queued == 1 && watcher->wake)
		watcher->wake(watcher, watcher->data);
}

json_t *watcher_next(struct watcher *watcher)
{
	struct change_event *event = TAILQ_FIRST(&watcher->queue);
	char path[PATH_MAX];

	if (!event)
		return NULL;
	json_t *message = json_object();
	json_object_set_new(message, "name", entry_text(event->name));
	json_object_set_new(message, "type", json_string(CHANGE_NAMES[event->change]));
	if (watcher->include_entry && event->change != CHANGE_REMOVE && event->change != CHANGE_RENAME) {
		bool itself = strcmp(event->name, ".") == 0;
		json_t *entry = itself					      ? entry_info(watcher->path)
				: path_join(watcher->path, event->name, path) ? entry_info(path)
									      : NULL;
		if (entry)
			json_object_set_new(message, "entry", entry);
	}
	drop_oldest(watcher);
	return message;
}

/* Uploads */

void watchers_upload_name(struct watchers *all, bool replaces, char out[WATCH_UPLOAD_NAME_MAX])
{
	snprintf(out, WATCH_UPLOAD_NAME_MAX, UPLOAD_PREFIX "%016" PRIx64 "-%c%" PRIx64, all->token,
		 replaces ? 'r' : 'n', all->serial++);
}

/* The character of an upload's name that says whether it replaces a file; NULL for other names. */
static const char *upload_kind(const struct watchers *all, const char *name)
{
	char prefix[WATCH_UPLOAD_NAME_MAX];
	int length = snprintf(prefix, sizeof prefix, UPLOAD_PREFIX "%016" PRIx64 "-", all->token);

	return strncmp(name, prefix, length) == 0 ? name + length : NULL;
}

bool watchers_is_upload(const struct watchers *all, const char *name)
{
	return upload_kind(all, name) != NULL;
}

static void upload_finished(struct view *view, const char *name)
{
	if (!tree_take_seen(view, name) && !view->watcher->all->upload_replaces)
		watch_push(view->watcher, CHANGE_CREATE, view->relative, name);
	watch_push(view->watcher, CHANGE_WRITE, view->relative, name);
	watch_push(view->watcher, CHANGE_CHMOD, view->relative, name);
}

/* Directories that come and go */

static void depart(struct view *view, uint32_t cookie, const char *name)
{
	size_t length = strlen(view->relative) + strlen(name) + 2;
	struct departure *departure = malloc(sizeof *departure + length);

	if (!departure)
		return;
	departure->watcher = view->watcher;
	departure->cookie = cookie;
	snprintf(departure->relative, length, "%s%s%s", view->relative, *view->relative ? "/" : "", name);
	SLIST_INSERT_HEAD(&view->watcher->all->departures, departure, link);
}

/* True when the directory `relative` is one that has just left another place of this tree and was watched there. */
static bool arrive(struct watcher *watcher, uint32_t cookie, const char *relative)
{
	struct departure *departure;

	SLIST_FOREACH (departure, &watcher->all->departures, link)
		if (departure->watcher == watcher && departure->cookie == cookie)
			break;
	if (!departure)
		return false;
	size_t renamed = tree_rename(watcher, departure->relative, relative);
	SLIST_REMOVE(&watcher->all->departures, departure, departure, link);
	free(departure);
	return renamed > 0;
}

/* Forgets departures `of` one watcher or (NULL) of all, from `relative` or (NULL) from anywhere. With `left` the
 * directories have left the tree for good, and with them their watches. */
static void forget_departures(struct watchers *all, const struct watcher *of, const char *relative, bool left)
{
	for (struct departure *departure = SLIST_FIRST(&all->departures), *next; departure; departure = next) {
		next = SLIST_NEXT(departure, link);
		if ((of && departure->watcher != of) || (relative && strcmp(departure->relative, relative) != 0))
			continue;
		SLIST_REMOVE(&all->departures, departure, departure, link);
		if (left)
			tree_remove(departure->watcher, departure->relative);
		free(departure);
	}
}

static void directory_appeared(struct view *view, const struct inotify_event *event, bool reported)
{
	struct watcher *watcher = view->watcher;
	char relative[PATH_MAX];

	if (snprintf(relative, sizeof relative, "%s%s%s", view->relative, *view->relative ? "/" : "", event->name) >=
	    (int)sizeof relative)
		return;
	bool known = (event->mask & IN_MOVED_TO) && arrive(watcher, event->cookie, relative);
	/* What had this name before and was moved away did not come back, or its arrival would have been seen. */
	forget_departures(watcher->all, watcher, relative, true);
	if (reported)
		return;
	/* Known directories are walked again: a walk that was under way when this one got its new name has missed what
	 * it did not find under the old one. A directory that cannot be watched (gone again, or the limit is reached)
	 * is still reported by its parent. */
	(void)tree_add(watcher, relative, known ? WALK_RESCAN : WALK_ANNOUNCE);
}

static void appeared(struct view *view, const struct inotify_event *event)
{
	bool reported = tree_take_seen(view, event->name);

	if (!reported)
		watch_push(view->watcher, CHANGE_CREATE, view->relative, event->name);
	if ((event->mask & IN_ISDIR) && view->watcher->recursive)
		directory_appeared(view, event, reported);
}

static void disappeared(struct view *view, const struct inotify_event *event)
{
	(void)tree_take_seen(view, event->name);
	watch_push(view->watcher, event->mask & IN_DELETE ? CHANGE_REMOVE : CHANGE_RENAME, view->relative, event->name);
	if ((event->mask & IN_MOVED_FROM) && (event->mask & IN_ISDIR) && view->watcher->recursive)
		depart(view, event->cookie, event->name);
}

/* Events about the watched directory itself; those of the directories below it come from their parents too. */
static void about_itself(struct view *view, uint32_t mask)
{
	if (*view->relative)
		return;
	if (mask & IN_ATTRIB)
		watch_push(view->watcher, CHANGE_CHMOD, "", ".");
	if (mask & IN_DELETE_SELF)
		watch_push(view->watcher, CHANGE_REMOVE, "", ".");
	if (mask & IN_MOVE_SELF)
		watch_push(view->watcher, CHANGE_RENAME, "", ".");
}

static void about_upload(struct watchers *all, const struct inotify_event *event, const char *kind)
{
	if (!(event->mask & IN_MOVED_FROM))
		return;
	all->upload_cookie = event->cookie;
	all->upload_replaces = *kind == 'r';
}

static void about_entry(struct view *view, const struct inotify_event *event)
{
	struct watchers *all = view->watcher->all;

	if ((event->mask & IN_MOVED_TO) && event->cookie && event->cookie == all->upload_cookie)
		upload_finished(view, event->name);
	else if (event->mask & (IN_CREATE | IN_MOVED_TO))
		appeared(view, event);
	else if (event->mask & (IN_DELETE | IN_MOVED_FROM))
		disappeared(view, event);
	else if (event->mask & IN_MODIFY)
		watch_push(view->watcher, CHANGE_WRITE, view->relative, event->name);
	else if (event->mask & IN_ATTRIB)
		watch_push(view->watcher, CHANGE_CHMOD, view->relative, event->name);
}

static void dispatch(struct watchers *all, const struct inotify_event *event)
{
	if (event->mask & IN_Q_OVERFLOW) {
		all->overflowed = true;
		return;
	}
	struct node *node = tree_find(all, event->wd);
	if (!node)
		return;
	if (event->mask & IN_IGNORED) {
		tree_forget(node);
		return;
	}
	const char *kind = event->len ? upload_kind(all, event->name) : NULL;
	if (kind) {
		about_upload(all, event, kind);
		return;
	}
	for (struct view *view = LIST_FIRST(&node->views), *next; view; view = next) {
		next = LIST_NEXT(view, of_node);
		if (event->len)
			about_entry(view, event);
		else
			about_itself(view, event->mask);
	}
}

/* The kernel's queue is empty: nothing that happened before is still on its way. */
static void settle(struct watchers *all)
{
	forget_departures(all, NULL, NULL, true);
	tree_clear_seen(all);
	if (!all->overflowed)
		return;
	all->overflowed = false;
	fprintf(stderr, "envd: watch: the kernel dropped file events; scanning again\n");
	struct watcher *watcher;
	LIST_FOREACH (watcher, &all->list, link)
		tree_rescan(watcher);
}

void watchers_pump(struct watchers *all)
{
	char buffer[65536] __attribute__((aligned(__alignof__(struct inotify_event))));

	for (int round = 0; round < READ_ROUNDS; round++) {
		ssize_t length = read(all->fd, buffer, sizeof buffer);
		if (length <= 0) {
			settle(all);
			return;
		}
		for (ssize_t at = 0; at < length;) {
			const struct inotify_event *event = (const void *)(buffer + at);
			dispatch(all, event);
			at += sizeof *event + event->len;
		}
	}
}

static void on_readable(evutil_socket_t fd, short what, void *data)
{
	watchers_pump(data);
}

/* Life */

struct watchers *watchers_new(struct event_base *base)
{
	struct watchers *all = calloc(1, sizeof *all);

	if (!all)
		return NULL;
	all->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	if (all->fd < 0 || getrandom(&all->token, sizeof all->token, GRND_NONBLOCK | GRND_INSECURE) < 0)
		goto failed;
	all->readable = event_new(base, all->fd, EV_READ | EV_PERSIST, on_readable, all);
	if (!all->readable || event_add(all->readable, NULL) != 0)
		goto failed;
	return all;
failed:
	watchers_free(all);
	return NULL;
}

void watchers_free(struct watchers *all)
{
	while (!LIST_EMPTY(&all->list))
		watcher_close(LIST_FIRST(&all->list));
	if (all->readable)
		event_free(all->readable);
	if (all->fd >= 0)
		close(all->fd);
	free(all);
}

struct watcher *watcher_open(struct watchers *all, const struct watch_options *options,
			     void (*wake)(struct watcher *watcher, void *data), void *data)
{
	struct stat st;

	if (stat(options->path, &st) != 0)
		return NULL;
	if (!S_ISDIR(st.st_mode)) {
		errno = ENOTDIR;
		return NULL;
	}
	if (all->n_watchers >= WATCH_WATCHERS_MAX) {
		errno = EMFILE;
		return NULL;
	}
	/* What is queued now belongs to the time before this watcher, which may share watches with others. */
	watchers_pump(all);
	struct watcher *watcher = calloc(1, sizeof *watcher);
	if (!watcher)
		return NULL;
	watcher->all = all;
	snprintf(watcher->id, sizeof watcher->id, "w%016" PRIx64 "-%" PRIx64, all->token, all->serial++);
	snprintf(watcher->path, sizeof watcher->path, "%s", options->path);
	watcher->recursive = options->recursive;
	watcher->include_entry = options->include_entry;
	watcher->allow_network_mounts = options->allow_network_mounts;
	TAILQ_INIT(&watcher->queue);
	LIST_INSERT_HEAD(&all->list, watcher, link);
	all->n_watchers++;
	if (tree_add(watcher, "", WALK_SILENT) != 0) {
		int error = errno;
		watcher_close(watcher);
		errno = error;
		return NULL;
	}
	watcher->wake = wake;
	watcher->data = data;
	return watcher;
}

void watcher_close(struct watcher *watcher)
{
	struct watchers *all = watcher->all;

	forget_departures(all, watcher, NULL, false);
	tree_remove_all(watcher);
	while (!TAILQ_EMPTY(&watcher->queue))
		drop_oldest(watcher);
	LIST_REMOVE(watcher, link);
	all->n_watchers--;
	free(watcher);
}

const char *watcher_id(const struct watcher *watcher)
{
	return watcher->id;
}

struct watcher *watchers_find(struct watchers *all, const char *id)
{
	struct watcher *watcher;

	LIST_FOREACH (watcher, &all->list, link)
		if (strcmp(watcher->id, id) == 0)
			return watcher;
	return NULL;
}
