#include "path.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Lexical cleaning of an absolute path in place: no empty components, no ".", and ".." takes one away. */
static void clean(char *path)
{
	size_t used = 0;
	const char *in = path;

	while (*in) {
		while (*in == '/')
			in++;
		size_t length = strcspn(in, "/");
		if (length == 0)
			break;
		if (length == 2 && memcmp(in, "..", 2) == 0) {
			while (used > 0 && path[--used] != '/')
				;
		} else if (!(length == 1 && *in == '.')) {
			path[used++] = '/';
			memmove(path + used, in, length);
			used += length;
		}
		in += length;
	}
	if (used == 0)
		path[used++] = '/';
	path[used] = '\0';
}

static bool has_long_component(const char *path)
{
	for (const char *in = path; *in;) {
		size_t length = strcspn(in, "/");
		if (length > NAME_MAX)
			return true;
		in += length;
		in += *in == '/';
	}
	return false;
}

int path_join(const char *directory, const char *name, char out[PATH_MAX])
{
	size_t length = strlen(directory);
	const char *slash = length > 0 && directory[length - 1] == '/' ? "" : "/";

	return snprintf(out, PATH_MAX, "%s%s%s", directory, slash, name) < PATH_MAX;
}

enum path_status path_resolve(const char *raw, size_t length, const char *home, const char *workdir, char out[PATH_MAX])
{
	if (memchr(raw, '\0', length))
		return PATH_HAS_NUL;
	if (length >= PATH_MAX || has_long_component(raw))
		return PATH_TOO_LONG;
	if (length == 0 && workdir && *workdir)
		return path_resolve(workdir, strlen(workdir), home, NULL, out);
	if (raw[0] == '/') {
		memcpy(out, raw, length + 1);
		path_trim(out);
		return PATH_OK;
	}
	if (raw[0] == '~') {
		if (raw[1] != '\0' && raw[1] != '/')
			return PATH_OTHER_HOME;
		raw++;
	}
	if (!path_join(home, raw, out))
		return PATH_TOO_LONG;
	clean(out);
	return PATH_OK;
}

const char *path_status_text(enum path_status status)
{
	switch (status) {
	case PATH_HAS_NUL:
		return "path contains a NUL byte";
	case PATH_TOO_LONG:
		return "path is too long";
	case PATH_OTHER_HOME:
		return "cannot expand user-specific home dir";
	case PATH_OK:
		break;
	}
	return "path is valid";
}

void path_trim(char *path)
{
	for (size_t length = strlen(path); length > 1 && path[length - 1] == '/'; length--)
		path[length - 1] = '\0';
}

void path_base(const char *path, char out[PATH_MAX])
{
	char copy[PATH_MAX];

	snprintf(copy, sizeof copy, "%s", path);
	path_trim(copy);
	const char *slash = strrchr(copy, '/');
	snprintf(out, PATH_MAX, "%s", slash && slash[1] ? slash + 1 : copy);
}

static bool is_directory(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* One level. A directory that somebody else makes at the same moment is as good as ours. */
static int make_one(const char *path, uid_t uid, gid_t gid)
{
	if (mkdir(path, 0755) == 0) {
		/* mkdir obeys the agent's umask; the mode promised to clients does not depend on it. */
		return chmod(path, 0755) == 0 && lchown(path, uid, gid) == 0 ? 0 : -1;
	}
	if (errno == EEXIST && !is_directory(path)) {
		errno = EEXIST;
		return -1;
	}
	return errno == EEXIST ? 0 : -1;
}

int path_make_directories(const char *path, uid_t uid, gid_t gid)
{
	char partial[PATH_MAX];
	size_t length = strlen(path);

	if (length >= sizeof partial) {
		errno = ENAMETOOLONG;
		return -1;
	}
	memcpy(partial, path, length + 1);
	if (is_directory(partial))
		return 0;
	for (size_t i = 1; i < length; i++) {
		if (partial[i] != '/')
			continue;
		partial[i] = '\0';
		if (!is_directory(partial) && make_one(partial, uid, gid) != 0) {
			if (errno == EEXIST)
				errno = ENOTDIR;
			return -1;
		}
		partial[i] = '/';
	}
	return make_one(partial, uid, gid);
}

int path_make_parents(const char *path, uid_t uid, gid_t gid)
{
	char parent[PATH_MAX];

	snprintf(parent, sizeof parent, "%s", path);
	path_trim(parent);
	char *slash = strrchr(parent, '/');
	if (!slash || slash == parent)
		return 0;
	*slash = '\0';
	if (path_make_directories(parent, uid, gid) == 0)
		return 0;
	if (errno == EEXIST)
		errno = ENOTDIR;
	return -1;
}
