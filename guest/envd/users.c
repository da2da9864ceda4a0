/* The files are parsed here: fgetpwent() and fgetgrent() make a system call for every line, which is what a guest under
 * software emulation can least afford at the start of each command. */
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char passwd_file[] = "/etc/passwd";
static const char group_file[] = "/etc/group";

enum {
	MAX_FILE = 4 << 20,
	/* name:password:uid:gid:comment:home:shell */
	PASSWD_NAME = 0, PASSWD_UID = 2, PASSWD_GID = 3, PASSWD_HOME = 5, PASSWD_SHELL = 6, PASSWD_FIELDS = 7,
	/* name:password:gid:members */
	GROUP_NAME = 0, GROUP_GID = 2, GROUP_MEMBERS = 3, GROUP_FIELDS = 4,
};

/* The whole file, malloc'ed, NUL-terminated; NULL when it cannot be read. */
static char *read_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t len = 0, size = 16 * 1024;
	char *text = malloc(size);
	ssize_t got = fd < 0 ? -1 : 0;

	while (text && fd >= 0 && (got = read(fd, text + len, size - len - 1)) != 0) {
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 || size >= MAX_FILE)
			break;
		len += (size_t)got;
		if (len == size - 1) {
			char *more = realloc(text, size *= 2);

			if (!more)
				break;
			text = more;
		}
	}
	if (fd >= 0)
		close(fd);
	if (!text || got != 0) {
		free(text);
		return NULL;
	}
	text[len] = 0;
	return text;
}

/* Cuts the next line into fields; comments, NIS entries and lines with too few fields are passed over. */
static bool next_entry(char **at, char **fields, size_t n_fields)
{
	char *line;

	while ((line = strsep(at, "\n"))) {
		size_t n = 0;

		if (!*line || strchr("#+-", *line))
			continue;
		while (n + 1 < n_fields && (fields[n] = strsep(&line, ":")))
			n++;
		if (n + 1 == n_fields && line) {
			fields[n] = line;
			return true;
		}
	}
	return false;
}

static bool parse_id(const char *text, uint32_t *id)
{
	unsigned long long value;
	char *end;

	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (*end || errno || value >= UINT32_MAX) /* the last one means "no change" to the kernel */
		return false;
	*id = (uint32_t)value;
	return true;
}

static void add_group(struct user *user, gid_t gid)
{
	size_t i;

	for (i = 0; i < user->n_groups; i++)
		if (user->groups[i] == gid)
			return;
	if (user->n_groups < USER_MAX_GROUPS)
		user->groups[user->n_groups++] = gid;
}

static bool is_member(char *members, const char *name)
{
	char *member;

	while ((member = strsep(&members, ",")))
		if (strcmp(member, name) == 0)
			return true;
	return false;
}

static void add_groups(struct user *user)
{
	char *text = read_file(group_file), *at = text, *fields[GROUP_FIELDS];
	gid_t gid;

	add_group(user, user->gid);
	while (next_entry(&at, fields, GROUP_FIELDS))
		if (parse_id(fields[GROUP_GID], &gid) && is_member(fields[GROUP_MEMBERS], user->name))
			add_group(user, gid);
	free(text);
}

static void set_names(struct user *user, const char *name, const char *home, const char *shell)
{
	user->name = strdup(name);
	user->home = strdup(*home ? home : "/");
	user->shell = strdup(*shell ? shell : "/bin/sh");
}

static bool find_user(const char *name, struct user *user)
{
	char *text = read_file(passwd_file), *at = text, *fields[PASSWD_FIELDS];
	bool found = false;

	while (!found && next_entry(&at, fields, PASSWD_FIELDS)) {
		found = strcmp(fields[PASSWD_NAME], name) == 0 && parse_id(fields[PASSWD_UID], &user->uid) &&
			parse_id(fields[PASSWD_GID], &user->gid);
		if (found)
			set_names(user, name, fields[PASSWD_HOME], fields[PASSWD_SHELL]);
	}
	free(text);
	return found;
}

bool user_lookup(const char *name, struct user *user)
{
	memset(user, 0, sizeof *user);
	if (!find_user(name, user)) {
		if (strcmp(name, "root") != 0)
			return false;
		user->uid = user->gid = 0;
		set_names(user, "root", "/root", "/bin/sh");
	}
	if (!user->name || !user->home || !user->shell) {
		user_clear(user);
		return false;
	}
	add_groups(user);
	return true;
}

void user_clear(struct user *user)
{
	free(user->name);
	free(user->home);
	free(user->shell);
	memset(user, 0, sizeof *user);
}

static void name_of_id(const char *file, size_t id_field, size_t n_fields, uint32_t wanted, char *out, size_t size)
{
	char *text = read_file(file), *at = text, *fields[PASSWD_FIELDS];
	uint32_t id;

	snprintf(out, size, "%u", wanted);
	while (next_entry(&at, fields, n_fields))
		if (parse_id(fields[id_field], &id) && id == wanted) {
			snprintf(out, size, "%s", fields[0]);
			break;
		}
	free(text);
}

void user_name(uid_t uid, char *out, size_t size)
{
	name_of_id(passwd_file, PASSWD_UID, PASSWD_FIELDS, uid, out, size);
}

void group_name(gid_t gid, char *out, size_t size)
{
	name_of_id(group_file, GROUP_GID, GROUP_FIELDS, gid, out, size);
}
