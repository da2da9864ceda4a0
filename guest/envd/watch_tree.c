#define _GNU_SOURCE
#include "watch_tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "path.h"

/* IN_EXCL_UNLINK: a file that is unlinked and still open has no name to report. */
#define WATCH_MASK                                                                                                     \
	(IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF | \
	 IN_ONLYDIR | IN_EXCL_UNLINK)

/* A directory that a walk still has to visit. */
struct step {
	SLIST_ENTRY(step) link;
	enum walk walk;
	char relative[];
};
SLIST_HEAD(steps, step);

static struct node_list *bucket(struct watchers *all, int wd)
{
	return &all->nodes[(unsigned)wd % WATCH_BUCKETS];
}

struct node *tree_find(struct watchers *all, int wd)
{
	struct node *node;

	LIST_FOREACH (node, bucket(all, wd), link)
		if (node->wd == wd)
			return node;
	return NULL;
}

static void clear_seen(struct view *view)
{
	if (SLIST_EMPTY(&view->seen))
		return;
	while (!SLIST_EMPTY(&view->seen)) {
		struct seen_name *seen = SLIST_FIRST(&view->seen);
		SLIST_REMOVE_HEAD(&view->seen, link);
		free(seen);
	}
	LIST_REMOVE(view, of_announced);
}

void tree_clear_seen(struct watchers *all)
{
	while (!LIST_EMPTY(&all->announced))
		clear_seen(LIST_FIRST(&all->announced));
}

static void remember_seen(struct view *view, const char *name)
{
	struct seen_name *seen = malloc(sizeof *seen + strlen(name) + 1);

	if (!seen)
		return;
	strcpy(seen->name, name);
	if (SLIST_EMPTY(&view->seen))
		LIST_INSERT_HEAD(&view->watcher->all->announced, view, of_announced);
	SLIST_INSERT_HEAD(&view->seen, seen, link);
}

bool tree_take_seen(struct view *view, const char *name)
{
	struct seen_name *seen;

	SLIST_FOREACH (seen, &view->seen, link)
		if (strcmp(seen->name, name) == 0)
			break;
	if (!seen)
		return false;
	SLIST_REMOVE(&view->seen, seen, seen_name, link);
	free(seen);
	if (SLIST_EMPTY(&view->seen))
		LIST_REMOVE(view, of_announced);
	return true;
}

static void free_view(struct view *view)
{
	clear_seen(view);
	LIST_REMOVE(view, of_node);
	LIST_REMOVE(view, of_watcher);
	free(view->relative);
	free(view);
}

void tree_forget(struct node *node)
{
	while (!LIST_EMPTY(&node->views))
		free_view(LIST_FIRST(&node->views));
	LIST_REMOVE(node, link);
	free(node);
}

static void detach(struct view *view)
{
	struct node *node = view->node;
	int fd = view->watcher->all->fd;

	free_view(view);
	if (!LIST_EMPTY(&node->views))
		return;
	/* Fails for a directory that is deleted already: then the kernel has removed the watch. */
	(void)inotify_rm_watch(fd, node->wd);
	tree_forget(node);
}

static bool lies_in(const char *relative, const char *top)
{
	size_t length = strlen(top);

	return length == 0 ||
	       (strncmp(relative, top, length) == 0 && (relative[length] == '\0' || relative[length] == '/'));
}

void tree_remove(struct watcher *watcher, const char *relative)
{
	for (struct view *view = LIST_FIRST(&watcher->views), *next; view; view = next) {
		next = LIST_NEXT(view, of_watcher);
		if (lies_in(view->relative, relative))
			detach(view);
	}
}

void tree_remove_all(struct watcher *watcher)
{
	tree_remove(watcher, "");
}

size_t tree_rename(struct watcher *watcher, const char *from, const char *to)
{
	struct view *view;
	size_t renamed = 0;

	LIST_FOREACH (view, &watcher->views, of_watcher) {
		char *name;
		if (!lies_in(view->relative, from) || asprintf(&name, "%s%s", to, view->relative + strlen(from)) < 0)
			continue;
		free(view->relative);
		view->relative = name;
		renamed++;
	}
	return renamed;
}

static struct node *get_node(struct watchers *all, int wd)
{
	struct node *node = tree_find(all, wd);

	if (node || !(node = calloc(1, sizeof *node)))
		return node;
	node->wd = wd;
	LIST_INSERT_HEAD(bucket(all, wd), node, link);
	return node;
}

/* The watcher's view of a watch descriptor. The kernel gives the same descriptor for the same directory, so a view
 * that exists already has perhaps got a new name. */
static struct view *attach(struct watcher *watcher, int wd, const char *relative, bool *fresh)
{
	struct node *node = get_node(watcher->all, wd);
	char *name = strdup(relative);
	struct view *view;

	*fresh = false;
	if (!node || !name)
		goto failed;
	LIST_FOREACH (view, &node->views, of_node)
		if (view->watcher == watcher)
			break;
	if (!view) {
		*fresh = true;
		view = calloc(1, sizeof *view);
		if (!view)
			goto failed;
		view->watcher = watcher;
		view->node = node;
		LIST_INSERT_HEAD(&node->views, view, of_node);
		LIST_INSERT_HEAD(&watcher->views, view, of_watcher);
	}
	free(view->relative);
	view->relative = name;
	view->generation = watcher->generation;
	return view;
failed:
	free(name);
	return NULL;
}

static bool is_network(long type)
{
	switch ((unsigned)type) {
	case NFS_SUPER_MAGIC:
	case SMB_SUPER_MAGIC:
	case CIFS_SUPER_MAGIC:
	case SMB2_SUPER_MAGIC:
	case FUSE_SUPER_MAGIC:
		return true;
	default:
		return false;
	}
}

/* The kernel's own file systems make no inotify events, and are large. */
static bool is_synthetic(long type)
{
	return type == PROC_SUPER_MAGIC || type == SYSFS_MAGIC;
}

static bool may_watch(const struct watcher *watcher, const char *path, bool top)
{
	struct statfs fs;

	if (statfs(path, &fs) != 0)
		return false;
	if (is_network(fs.f_type) && !watcher->allow_network_mounts) {
		errno = EREMOTE;
		return false;
	}
	return top || !is_synthetic(fs.f_type);
}

static mode_t entry_mode(int directory, const struct dirent *entry, off_t *size)
{
	struct stat st;

	*size = 0;
	if (entry->d_type == DT_DIR)
		return S_IFDIR;
	if (fstatat(directory, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
		return 0;
	*size = st.st_size;
	return st.st_mode & S_IFMT;
}

static void plan(struct steps *steps, const char *directory, const char *name, enum walk walk)
{
	size_t length = strlen(directory) + strlen(name) + 2;
	struct step *step = malloc(sizeof *step + length);

	if (!step)
		return;
	snprintf(step->relative, length, "%s%s%s", directory, *directory && *name ? "/" : "", name);
	step->walk = walk;
	SLIST_INSERT_HEAD(steps, step, link);
}

static void announce(struct view *view, const char *name, mode_t type, off_t size)
{
	watch_push(view->watcher, CHANGE_CREATE, view->relative, name);
	if (S_ISREG(type) && size > 0)
		watch_push(view->watcher, CHANGE_WRITE, view->relative, name);
	remember_seen(view, name);
}

static void read_entries(struct view *view, DIR *directory, enum walk walk, struct steps *steps)
{
	struct watcher *watcher = view->watcher;

	for (struct dirent *entry; (entry = readdir(directory));) {
		off_t size;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
		    watchers_is_upload(watcher->all, entry->d_name))
			continue;
		mode_t type = entry->d_type != DT_DIR && entry->d_type != DT_UNKNOWN && walk != WALK_ANNOUNCE
				      ? 0
				      : entry_mode(dirfd(directory), entry, &size);
		if (walk == WALK_ANNOUNCE && type)
			announce(view, entry->d_name, type, size);
		if (S_ISDIR(type) && watcher->recursive)
			plan(steps, view->relative, entry->d_name, walk);
	}
}

static int visit(struct watcher *watcher, const struct step *step, struct steps *steps)
{
	char path[PATH_MAX];
	bool top = *step->relative == '\0', fresh;
	enum walk walk = step->walk;

	if (top)
		snprintf(path, sizeof path, "%s", watcher->path);
	else if (!path_join(watcher->path, step->relative, path))
		return -1;
	if (!may_watch(watcher, path, top))
		return -1;
	/* The watch comes before the reading: what appears in between is then seen twice, never missed. */
	int wd = inotify_add_watch(watcher->all->fd, path, WATCH_MASK | (top ? 0 : IN_DONT_FOLLOW));
	struct view *view = wd < 0 ? NULL : attach(watcher, wd, step->relative, &fresh);
	if (!view)
		return -1;
	if (walk == WALK_RESCAN && fresh && !top) {
		watch_push(watcher, CHANGE_CREATE, "", step->relative);
		walk = WALK_ANNOUNCE;
	}
	if (!fresh && walk == WALK_ANNOUNCE)
		walk = WALK_RESCAN;
	if (!watcher->recursive)
		return 0;
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (top ? 0 : O_NOFOLLOW));
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	if (!directory)
		return 0;
	read_entries(view, directory, walk, steps);
	closedir(directory);
	return 0;
}

int tree_add(struct watcher *watcher, const char *relative, enum walk walk)
{
	struct steps steps = SLIST_HEAD_INITIALIZER(steps);
	int result = 0, error = 0;
	bool first = true;

	plan(&steps, relative, "", walk);
	while (!SLIST_EMPTY(&steps)) {
		struct step *step = SLIST_FIRST(&steps);
		SLIST_REMOVE_HEAD(&steps, link);
		int visited = visit(watcher, step, &steps);
		if (visited != 0 && (first || errno == ENOSPC)) {
			result = -1;
			error = errno;
		}
		first = false;
		free(step);
	}
	errno = error;
	return result;
}

void tree_rescan(struct watcher *watcher)
{
	watcher->generation++;
	(void)tree_add(watcher, "", WALK_RESCAN);
	for (struct view *view = LIST_FIRST(&watcher->views), *next; view; view = next) {
		next = LIST_NEXT(view, of_watcher);
		if (view->generation != watcher->generation)
			detach(view);
	}
}
