#define _GNU_SOURCE
#include "entry.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>

#include "path.h"
#include "users.h"

/* Length of the valid UTF-8 sequence at `s` (NUL-terminated), or 0. Surrogates and overlong forms are not valid. */
static size_t utf8_sequence(const unsigned char *s)
{
	size_t length = s[0] < 0x80		      ? 1
			: s[0] >= 0xC2 && s[0] < 0xE0 ? 2
			: (s[0] & 0xF0) == 0xE0	      ? 3
			: s[0] >= 0xF0 && s[0] < 0xF5 ? 4
						      : 0;

	for (size_t i = 1; i < length; i++)
		if ((s[i] & 0xC0) != 0x80)
			return 0;
	if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) || (s[0] == 0xF0 && s[1] < 0x90) ||
	    (s[0] == 0xF4 && s[1] > 0x8F))
		return 0;
	return length;
}

json_t *entry_text(const char *bytes)
{
	json_t *text = json_string(bytes);

	if (text)
		return text;
	char *clean = malloc(3 * strlen(bytes) + 1);
	if (!clean)
		return NULL;
	size_t used = 0;
	for (const unsigned char *in = (const unsigned char *)bytes; *in;) {
		size_t length = utf8_sequence(in);
		memcpy(clean + used, length ? (const char *)in : "\xEF\xBF\xBD", length ? length : 3);
		used += length ? length : 3;
		in += length ? length : 1;
	}
	text = json_stringn_nocheck(clean, used);
	free(clean);
	return text;
}

/* The spelling of Go's fs.FileMode, which the reference agent sends: type letters, then the nine permission bits. */
static void permission_text(mode_t mode, char out[16])
{
	char *end = out;

	if (S_ISDIR(mode))
		*end++ = 'd';
	if (S_ISLNK(mode))
		*end++ = 'L';
	if (S_ISBLK(mode) || S_ISCHR(mode))
		*end++ = 'D';
	if (S_ISFIFO(mode))
		*end++ = 'p';
	if (S_ISSOCK(mode))
		*end++ = 'S';
	if (mode & S_ISUID)
		*end++ = 'u';
	if (mode & S_ISGID)
		*end++ = 'g';
	if (S_ISCHR(mode))
		*end++ = 'c';
	if (mode & S_ISVTX)
		*end++ = 't';
	if (end == out)
		*end++ = '-';
	for (int bit = 8; bit >= 0; bit--)
		*end++ = mode & (1u << bit) ? "xwr"[bit % 3] : '-';
	*end = '\0';
}

static const char *type_name(mode_t mode)
{
	if (S_ISREG(mode))
		return "FILE_TYPE_FILE";
	if (S_ISDIR(mode))
		return "FILE_TYPE_DIRECTORY";
	if (S_ISLNK(mode))
		return "FILE_TYPE_SYMLINK";
	return "FILE_TYPE_UNSPECIFIED";
}

/* RFC 3339 with nanoseconds. protobuf's Timestamp ends at year 9999; a file's time need not. */
static json_t *timestamp(struct timespec when)
{
	static const time_t FIRST = -62135596800, LAST = 253402300799;
	time_t seconds = when.tv_sec < FIRST ? FIRST : when.tv_sec > LAST ? LAST : when.tv_sec;
	struct tm tm;
	char text[128];

	gmtime_r(&seconds, &tm);
	snprintf(text, sizeof text, "%04d-%02d-%02dT%02d:%02d:%02d.%09ldZ", tm.tm_year + 1900, tm.tm_mon + 1,
		 tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, when.tv_nsec);
	return json_string(text);
}

/* One listxattr or getxattr into a fresh buffer, NUL-terminated; NULL when there is nothing to read. A value that
 * grows between the two calls is read as absent. */
static char *read_attribute(const char *path, const char *name, ssize_t *length)
{
	*length = name ? getxattr(path, name, NULL, 0) : listxattr(path, NULL, 0);
	if (*length < 0 || (!name && *length == 0))
		return NULL;
	char *value = malloc(*length + 1);
	if (!value)
		return NULL;
	*length = name ? getxattr(path, name, value, *length) : listxattr(path, value, *length);
	if (*length < 0) {
		free(value);
		return NULL;
	}
	value[*length] = '\0';
	return value;
}

/* Metadata of what `path` leads to: an object of strings, or NULL when there is none. */
static json_t *read_metadata(const char *path)
{
	ssize_t total;
	char *names = read_attribute(path, NULL, &total);
	json_t *metadata = NULL;

	if (!names)
		return NULL;
	for (char *name = names; name < names + total; name += strlen(name) + 1) {
		if (strncmp(name, ENTRY_XATTR_PREFIX, strlen(ENTRY_XATTR_PREFIX)) != 0)
			continue;
		ssize_t length;
		char *value = read_attribute(path, name, &length);
		json_t *key = value ? entry_text(name + strlen(ENTRY_XATTR_PREFIX)) : NULL;
		if (key) {
			if (!metadata)
				metadata = json_object();
			json_object_set_new_nocheck(metadata, json_string_value(key), entry_text(value));
			json_decref(key);
		}
		free(value);
	}
	free(names);
	return metadata;
}

static int remove_metadata(int fd)
{
	char names[65536]; /* XATTR_LIST_MAX */
	ssize_t total = flistxattr(fd, names, sizeof names);

	if (total < 0)
		return errno == ENOTSUP ? 0 : -1;
	for (char *name = names; name < names + total; name += strlen(name) + 1)
		if (strncmp(name, ENTRY_XATTR_PREFIX, strlen(ENTRY_XATTR_PREFIX)) == 0 && fremovexattr(fd, name) != 0)
			return -1;
	return 0;
}

int entry_set_metadata(int fd, const json_t *metadata)
{
	const char *key;
	json_t *value;

	if (remove_metadata(fd) != 0)
		return -1;
	json_object_foreach ((json_t *)metadata, key, value) {
		char name[sizeof ENTRY_XATTR_PREFIX + ENTRY_METADATA_KEY_MAX];
		snprintf(name, sizeof name, "%s%s", ENTRY_XATTR_PREFIX, key);
		if (fsetxattr(fd, name, json_string_value(value), json_string_length(value), 0) != 0)
			return -1;
	}
	return 0;
}

static void add_symlink(json_t *info, const char *path)
{
	char *target = realpath(path, NULL);

	/* A link that leads nowhere has no resolved path: then it is its own answer. */
	json_object_set_new(info, "symlinkTarget", entry_text(target ? target : path));
	json_object_set_new(info, "isSymlink", json_true());
	free(target);
}

static void look_up_names(struct entry_names *names, const struct stat *st)
{
	if (!names->valid || names->uid != st->st_uid)
		user_name(st->st_uid, names->owner, sizeof names->owner);
	if (!names->valid || names->gid != st->st_gid)
		group_name(st->st_gid, names->group, sizeof names->group);
	names->uid = st->st_uid;
	names->gid = st->st_gid;
	names->valid = true;
}

json_t *entry_info_with(const char *path, struct entry_names *names)
{
	struct stat link, target;
	char name[PATH_MAX], permissions[16], size[32];

	if (lstat(path, &link) != 0)
		return NULL;
	if (!S_ISLNK(link.st_mode) || stat(path, &target) != 0)
		target = link;
	path_base(path, name);
	look_up_names(names, &link);
	permission_text(link.st_mode, permissions);
	snprintf(size, sizeof size, "%lld", (long long)link.st_size);

	json_t *info = json_object();
	json_object_set_new(info, "name", entry_text(name));
	json_object_set_new(info, "type", json_string(type_name(target.st_mode)));
	json_object_set_new(info, "path", entry_text(path));
	json_object_set_new(info, "size", json_string(size));
	json_object_set_new(info, "mode", json_integer(target.st_mode & 0777));
	json_object_set_new(info, "permissions", json_string(permissions));
	json_object_set_new(info, "owner", entry_text(names->owner));
	json_object_set_new(info, "group", entry_text(names->group));
	json_object_set_new(info, "modifiedTime", timestamp(link.st_mtim));
	if (S_ISLNK(link.st_mode))
		add_symlink(info, path);
	if (S_ISREG(target.st_mode) || S_ISDIR(target.st_mode)) {
		json_t *metadata = read_metadata(path);
		if (metadata)
			json_object_set_new(info, "metadata", metadata);
	}
	return info;
}

json_t *entry_info(const char *path)
{
	struct entry_names names = {.valid = false};

	return entry_info_with(path, &names);
}
