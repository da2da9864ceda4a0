/* Paths as clients send them: expansion, checks, and the directories above a new file. */
#ifndef ENVD_PATH_H
#define ENVD_PATH_H

#include <limits.h>
#include <stddef.h>
#include <sys/types.h>

enum path_status {
	PATH_OK,
	PATH_HAS_NUL,	 /* the text holds a NUL byte */
	PATH_TOO_LONG,	 /* a component above NAME_MAX, or the whole at or above PATH_MAX */
	PATH_OTHER_HOME, /* "~name": only the caller's own home can be named by a tilde */
};

/* Makes the absolute path that `raw` (of `length` bytes) names for a user whose home directory is `home`.
 *
 * Absolute paths are taken as they are. "~" and "~/x" are the home. A relative path is cleaned lexically and lies in
 * the home. An empty path is `workdir` where that is set (itself expanded by the same rules), else the home. `out` is
 * filled only when PATH_OK is returned. */
enum path_status path_resolve(const char *raw, size_t length, const char *home, const char *workdir,
			      char out[PATH_MAX]);

/* What to tell the client about a status other than PATH_OK. */
const char *path_status_text(enum path_status status);

/* The last component of an absolute path, into `out`; "/" for the root. Trailing slashes do not count. */
void path_base(const char *path, char out[PATH_MAX]);

/* Removes trailing slashes, but never the one of the root. */
void path_trim(char *path);

/* `directory` + "/" + `name` into `out`; false when it does not fit. */
int path_join(const char *directory, const char *name, char out[PATH_MAX]);

/* Creates directory `path` and whatever is missing above it, mode 0755, each new one owned by uid:gid.
 * Returns 0, or -1 with errno; EEXIST only when `path` is there already and is not a directory. */
int path_make_directories(const char *path, uid_t uid, gid_t gid);

/* The same for the directory that is to hold `path`. */
int path_make_parents(const char *path, uid_t uid, gid_t gid);

#endif
