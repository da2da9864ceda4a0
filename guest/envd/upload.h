/* One file being written for a client: it appears under its name whole, or not at all.
 *
 * The bytes go to a temporary file in the target's directory, which is renamed over the target at the end. Where that
 * cannot be (the target is in /proc or /sys, whose directories take no files) an existing file is written in place.
 */
#ifndef ENVD_UPLOAD_H
#define ENVD_UPLOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <jansson.h>

struct watchers;
struct upload;

struct upload_options {
	struct watchers *watchers; /* names the temporary file */
	const char *path;	   /* absolute */
	uid_t uid;		   /* owner of the file and of directories made for it */
	gid_t gid;
	const json_t *metadata; /* object of strings or NULL: replaces all metadata of the file */
};

/* NULL with errno; EISDIR for a directory, ENOTSUP for a device, pipe or socket. A symbolic link at the end of the path
 * is followed, also when its target does not exist yet. */
struct upload *upload_open(const struct upload_options *options);
/* 0 or -1 with errno. */
int upload_write(struct upload *upload, const void *data, size_t length);
/* The descriptor that upload_write writes to. */
int upload_descriptor(const struct upload *upload);
/* No more data: sets the metadata and gives the descriptor back. 0 or -1 with errno. */
int upload_finish(struct upload *upload);
/* Puts a finished file in its place. 0 or -1 with errno. */
int upload_commit(struct upload *upload);
/* Frees the record; removes the temporary file unless it was committed. */
void upload_free(struct upload *upload);
/* The path as it was given. */
const char *upload_path(const struct upload *upload);

#endif
