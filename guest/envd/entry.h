/* EntryInfo: what clients are told about a file, and its metadata in extended attributes. */
#ifndef ENVD_ENTRY_H
#define ENVD_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <jansson.h>

/* User metadata lives in these extended attributes; other user.* attributes are not the agent's. */
#define ENTRY_XATTR_PREFIX "user.e2b."
/* XATTR_NAME_MAX less the prefix. */
#define ENTRY_METADATA_KEY_MAX 246
/* Of all keys (with prefix) and values of one file: ext4 keeps them in one block. */
#define ENTRY_METADATA_TOTAL_MAX 4096

/* EntryInfo of `path` in protobuf's JSON mapping (camelCase, int64 as text); NULL with errno when lstat fails.
 * A symbolic link has the type and mode of what it points to; a dangling one is FILE_TYPE_SYMLINK. */
json_t *entry_info(const char *path);

/* The names found last, so that a listing does not read /etc/passwd for every entry. Start with valid = false. */
struct entry_names {
	bool valid;
	uid_t uid;
	gid_t gid;
	char owner[256], group[256];
};
json_t *entry_info_with(const char *path, struct entry_names *names);

/* Makes the metadata of the open file exactly `metadata` (an object of strings; NULL: none).
 * Returns 0 or -1 with errno. */
int entry_set_metadata(int fd, const json_t *metadata);

/* A JSON string of a file name, which may be any bytes: what is not UTF-8 becomes U+FFFD. */
json_t *entry_text(const char *bytes);

#endif
