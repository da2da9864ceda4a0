/* Inside of the watchers: which directories are watched, for whom, and under which name. */
#ifndef ENVD_WATCH_TREE_H
#define ENVD_WATCH_TREE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "watch.h"

#define WATCH_BUCKETS 1024 /* of the table of watch descriptors */

enum change { CHANGE_CREATE, CHANGE_WRITE, CHANGE_REMOVE, CHANGE_RENAME, CHANGE_CHMOD };

struct change_event {
	TAILQ_ENTRY(change_event) link;
	enum change change;
	char name[]; /* relative to the watched directory */
};

/* A name that a walk of a new directory has reported, whose own create event may still be on its way. */
struct seen_name {
	SLIST_ENTRY(seen_name) link;
	char name[];
};

/* One directory as one watcher sees it. */
struct view {
	LIST_ENTRY(view) of_node;
	LIST_ENTRY(view) of_watcher;
	LIST_ENTRY(view) of_announced; /* linked while `seen` holds something */
	struct watcher *watcher;
	struct node *node;
	char *relative; /* "" for the watched directory itself */
	SLIST_HEAD(seen_names, seen_name) seen;
	unsigned generation;
};

LIST_HEAD(view_list, view);

/* One watch of the kernel; several watchers may look at the same directory. */
struct node {
	LIST_ENTRY(node) link;
	int wd;
	struct view_list views;
};

LIST_HEAD(node_list, node);
TAILQ_HEAD(change_queue, change_event);

struct watcher {
	LIST_ENTRY(watcher) link;
	struct watchers *all;
	char id[40];
	char path[PATH_MAX];
	bool recursive, include_entry, allow_network_mounts;
	struct view_list views;
	struct change_queue queue;
	size_t queued;
	unsigned generation; /* of the last walk of the whole tree */
	void (*wake)(struct watcher *watcher, void *data);
	void *data;
};

/* A directory that was renamed away and whose new name, in the same tree, is expected next. */
struct departure {
	SLIST_ENTRY(departure) link;
	struct watcher *watcher;
	uint32_t cookie;
	char relative[];
};

struct watchers {
	int fd;
	struct event *readable;
	struct node_list nodes[WATCH_BUCKETS];
	LIST_HEAD(, watcher) list;
	SLIST_HEAD(, departure) departures;
	struct view_list announced;
	size_t n_watchers;
	uint64_t token, serial;
	uint32_t upload_cookie; /* rename of an upload's temporary file in progress */
	bool upload_replaces;
	bool overflowed;
};

enum walk {
	WALK_SILENT,   /* what is there, was there before */
	WALK_ANNOUNCE, /* what is there is new: report it, for its own events came too early */
	WALK_RESCAN,   /* events were lost: report what is not watched yet */
};

/* watch.c: queues an event for `name` in the directory `relative`. */
void watch_push(struct watcher *watcher, enum change change, const char *relative, const char *name);
struct node *tree_find(struct watchers *all, int wd);
/* Watches the directory `relative` ("" = root) and, for a recursive watcher, all below it. -1 with errno when the top
 * one cannot be watched; what vanishes below it during the walk is no error. */
int tree_add(struct watcher *watcher, const char *relative, enum walk walk);
/* Forgets the kernel's watch, which is gone already. */
void tree_forget(struct node *node);
void tree_remove(struct watcher *watcher, const char *relative);
void tree_remove_all(struct watcher *watcher);
/* New names for a directory and all below it; how many directories were known. */
size_t tree_rename(struct watcher *watcher, const char *from, const char *to);
/* Finds what changed while events were lost. */
void tree_rescan(struct watcher *watcher);
/* True when a walk has reported this name; once. */
bool tree_take_seen(struct view *view, const char *name);
void tree_clear_seen(struct watchers *all);

#endif
