/* Users and groups from /etc/passwd and /etc/group of the image, read as files: a static glibc must
 * not go through NSS, and an image may have none. Without an entry "root" is uid 0 with home /root. */
#ifndef ENVD_USERS_H
#define ENVD_USERS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define USER_MAX_GROUPS 64

struct user {
	char *name, *home, *shell;
	uid_t uid;
	gid_t gid;
	gid_t groups[USER_MAX_GROUPS]; /* supplementary groups, with gid */
	size_t n_groups;
};

bool user_lookup(const char *name, struct user *user); /* false: unknown, nothing to clear */
void user_clear(struct user *user);
/* Name of an id, or the number when it has none. */
void user_name(uid_t uid, char *out, size_t size);
void group_name(gid_t gid, char *out, size_t size);

#endif
