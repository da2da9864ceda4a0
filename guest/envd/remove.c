#define _GNU_SOURCE
#include "remove.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/stat.h>
#include <unistd.h>

#define OPEN_DIRECTORY (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)

/* A directory on the way down. Only the deepest is open, so that depth costs memory and not descriptors; the way back
 * up is "..", checked against the identity that the parent had. */
struct level {
	SLIST_ENTRY(level) link;
	dev_t device;
	ino_t inode;
	char name[]; /* of this directory in its parent */
};
SLIST_HEAD(levels, level);

static struct level *enter(struct levels *levels, int fd, const char *name)
{
	struct level *level = malloc(sizeof *level + strlen(name) + 1);
	struct stat st;

	if (!level || fstat(fd, &st) != 0) {
		free(level);
		return NULL;
	}
	level->device = st.st_dev;
	level->inode = st.st_ino;
	strcpy(level->name, name);
	SLIST_INSERT_HEAD(levels, level, link);
	return level;
}

/* 0: gone. 1: a directory that holds something. -1: errno. */
static int remove_entry(int parent, const char *name)
{
	if (unlinkat(parent, name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR)
		return -1;
	if (unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
		return 0;
	return errno == ENOTEMPTY || errno == EEXIST ? 1 : -1;
}

/* Empties the open directory. 0: empty. 1: `child` is the descriptor of a directory in it that comes first. */
static int empty(int fd, struct levels *levels, int *child)
{
	int copy = openat(fd, ".", OPEN_DIRECTORY);
	DIR *directory = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;
	int result = 0;

	if (!directory) {
		if (copy >= 0)
			close(copy);
		return -1;
	}
	while (result == 0 && (errno = 0, entry = readdir(directory))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		result = remove_entry(fd, entry->d_name);
		if (result == 1) {
			*child = openat(fd, entry->d_name, OPEN_DIRECTORY);
			if (*child < 0 || !enter(levels, *child, entry->d_name))
				result = -1;
		}
	}
	int error = errno;
	closedir(directory);
	errno = error;
	return result == 0 && error ? -1 : result;
}

static int leave(struct levels *levels, int fd)
{
	struct level *done = SLIST_FIRST(levels), *above = SLIST_NEXT(done, link);
	struct stat st;
	int parent = openat(fd, "..", OPEN_DIRECTORY);

	close(fd);
	if (parent < 0)
		return -1;
	if (fstat(parent, &st) != 0 || st.st_dev != above->device || st.st_ino != above->inode) {
		close(parent);
		errno = EBUSY; /* somebody moved the directory away while we were in it */
		return -1;
	}
	if (unlinkat(parent, done->name, AT_REMOVEDIR) != 0 && errno != ENOENT && errno != ENOTEMPTY) {
		int error = errno;
		close(parent);
		errno = error;
		return -1;
	}
	SLIST_REMOVE_HEAD(levels, link);
	free(done);
	return parent;
}

static int remove_tree(const char *path)
{
	struct levels levels = SLIST_HEAD_INITIALIZER(levels);
	int fd = open(path, OPEN_DIRECTORY), error = 0;

	if (fd < 0 || !enter(&levels, fd, path))
		error = errno;
	while (!error) {
		int child = -1, found = empty(fd, &levels, &child);
		if (found < 0) {
			error = errno;
			if (child >= 0)
				close(child);
		} else if (found == 1) {
			close(fd);
			fd = child;
		} else if (!SLIST_NEXT(SLIST_FIRST(&levels), link)) {
			break;
		} else if ((fd = leave(&levels, fd)) < 0) {
			error = errno;
		}
	}
	if (fd >= 0)
		close(fd);
	while (!SLIST_EMPTY(&levels)) {
		struct level *level = SLIST_FIRST(&levels);
		SLIST_REMOVE_HEAD(&levels, link);
		free(level);
	}
	if (error) {
		errno = error;
		return error == ENOENT ? 0 : -1;
	}
	return rmdir(path);
}

int remove_all(const char *path)
{
	int found = remove_entry(AT_FDCWD, path);

	if (found < 0 && errno == ENOTDIR)
		return 0; /* a component above is a file: nothing of that name exists */
	return found == 1 ? remove_tree(path) : found;
}
