#define _GNU_SOURCE
#include "upload.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entry.h"
#include "path.h"
#include "watch.h"

#define LINKS_MAX 40 /* as in the kernel's path walk */
#define NEW_FILE_MODE 0644
#define COPY_CHUNK (1 << 20)

struct upload {
	char *path;	 /* as the client named it */
	char *target;	 /* with symbolic links at its end followed */
	char *temporary; /* NULL: written in place, or committed */
	json_t *metadata;
	int fd;
	bool in_place;
};

/* Replaces `path` by where the symbolic link at its end leads, as open() without O_NOFOLLOW would; the last target need
 * not exist. */
static int follow_links(char path[PATH_MAX])
{
	for (int links = 0; links < LINKS_MAX; links++) {
		char target[PATH_MAX], next[PATH_MAX];
		ssize_t length = readlink(path, target, sizeof target - 1);
		if (length < 0)
			return errno == EINVAL || errno == ENOENT ? 0 : -1; /* EINVAL: not a link */
		target[length] = '\0';
		char *slash = strrchr(path, '/');
		if (target[0] != '/') {
			slash[1] = '\0';
			if (!path_join(path, target, next)) {
				errno = ENAMETOOLONG;
				return -1;
			}
		} else {
			strcpy(next, target);
		}
		strcpy(path, next);
		path_trim(path);
	}
	errno = ELOOP;
	return -1;
}

/* Whether the target exists, and its mode. -1 with errno when it is nothing that can be written. */
static int look_at_target(const char *target, bool *exists, mode_t *mode)
{
	struct stat st;

	*exists = stat(target, &st) == 0;
	if (!*exists) {
		*mode = NEW_FILE_MODE;
		return errno == ENOENT ? 0 : -1;
	}
	*mode = st.st_mode & 0777;
	if (S_ISREG(st.st_mode))
		return 0;
	errno = S_ISDIR(st.st_mode) ? EISDIR : ENOTSUP;
	return -1;
}

static int open_temporary(struct upload *upload, const struct upload_options *options, bool replaces, mode_t mode)
{
	char name[WATCH_UPLOAD_NAME_MAX], directory[PATH_MAX], path[PATH_MAX];

	watchers_upload_name(options->watchers, replaces, name);
	snprintf(directory, sizeof directory, "%s", upload->target);
	strrchr(directory, '/')[1] = '\0';
	if (!path_join(directory, name, path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	upload->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (upload->fd < 0)
		return -1;
	upload->temporary = strdup(path);
	if (!upload->temporary) {
		unlink(path);
		return -1;
	}
	if (fchown(upload->fd, options->uid, options->gid) != 0 || fchmod(upload->fd, mode) != 0)
		return -1;
	return 0;
}

/* Errors of the temporary file that say that there are no resources, not that the place takes no files. */
static bool lacks_resources(int error)
{
	return error == ENOSPC || error == EDQUOT || error == EMFILE || error == ENFILE || error == ENOMEM ||
	       error == EIO;
}

static int open_target(struct upload *upload, const struct upload_options *options)
{
	bool exists;
	mode_t mode;

	if (look_at_target(upload->target, &exists, &mode) != 0)
		return -1;
	if (open_temporary(upload, options, exists, mode) == 0)
		return 0;
	if (!exists || upload->temporary || lacks_resources(errno))
		return -1;
	upload->in_place = true;
	upload->fd = open(upload->target, O_WRONLY | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	return upload->fd < 0 ? -1 : 0;
}

struct upload *upload_open(const struct upload_options *options)
{
	struct upload *upload = calloc(1, sizeof *upload);
	char target[PATH_MAX];

	if (!upload)
		return NULL;
	upload->fd = -1;
	upload->metadata = options->metadata ? json_incref((json_t *)options->metadata) : NULL;
	snprintf(target, sizeof target, "%s", options->path);
	upload->path = strdup(options->path);
	if (!upload->path || path_make_parents(target, options->uid, options->gid) != 0 || follow_links(target) != 0)
		goto failed;
	upload->target = strdup(target);
	if (upload->target && open_target(upload, options) == 0)
		return upload;
failed:;
	int error = errno;
	upload_free(upload);
	errno = error;
	return NULL;
}

int upload_write(struct upload *upload, const void *data, size_t length)
{
	const char *at = data;

	while (length > 0) {
		ssize_t written = write(upload->fd, at, length);
		if (written < 0 && errno == EINTR)
			continue;
		if (written < 0)
			return -1;
		at += written;
		length -= written;
	}
	return 0;
}

int upload_descriptor(const struct upload *upload)
{
	return upload->fd;
}

int upload_finish(struct upload *upload)
{
	int fd = upload->fd;

	if (entry_set_metadata(fd, upload->metadata) != 0)
		return -1;
	upload->fd = -1;
	return close(fd); /* some file systems report a failed write only now */
}

static int copy_descriptor(int from, int to)
{
	ssize_t copied;

	do {
		copied = sendfile(to, from, NULL, COPY_CHUNK);
	} while (copied > 0 || (copied < 0 && errno == EINTR));
	return copied < 0 ? -1 : 0;
}

/* A file that is a mount point (a bind-mounted /etc/hosts, say) cannot be replaced, only filled. */
static int copy_over(struct upload *upload)
{
	int from = open(upload->temporary, O_RDONLY | O_CLOEXEC);
	int to = from < 0 ? -1 : open(upload->target, O_WRONLY | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	int result = -1;

	if (to >= 0 && copy_descriptor(from, to) == 0)
		result = entry_set_metadata(to, upload->metadata);
	int error = errno;
	if (from >= 0)
		close(from);
	if (to >= 0)
		close(to);
	errno = error;
	return result;
}

int upload_commit(struct upload *upload)
{
	if (upload->in_place)
		return 0;
	if (rename(upload->temporary, upload->target) == 0) {
		free(upload->temporary);
		upload->temporary = NULL;
		return 0;
	}
	return errno == EBUSY ? copy_over(upload) : -1;
}

void upload_free(struct upload *upload)
{
	if (upload->temporary)
		unlink(upload->temporary);
	if (upload->fd >= 0)
		close(upload->fd);
	json_decref(upload->metadata);
	free(upload->temporary);
	free(upload->target);
	free(upload->path);
	free(upload);
}

const char *upload_path(const struct upload *upload)
{
	return upload->path;
}
