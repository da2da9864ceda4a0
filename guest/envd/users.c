#include "users.h"

#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char passwd_file[] = "/etc/passwd";
static const char group_file[] = "/etc/group";

/* Calls back for each entry until `wanted` says yes. */
static bool find_passwd(bool (*wanted)(const struct passwd *entry, const void *key), const void *key,
			void (*take)(const struct passwd *entry, void *out), void *out)
{
	FILE *file = fopen(passwd_file, "re");
	struct passwd *entry;
	bool found = false;

	if (!file)
		return false;
	while (!found && (entry = fgetpwent(file)))
		if (wanted(entry, key)) {
			take(entry, out);
			found = true;
		}
	fclose(file);
	return found;
}

static bool has_name(const struct passwd *entry, const void *name)
{
	return strcmp(entry->pw_name, name) == 0;
}

static bool has_uid(const struct passwd *entry, const void *uid)
{
	return entry->pw_uid == *(const uid_t *)uid;
}

static void take_user(const struct passwd *entry, void *out)
{
	struct user *user = out;

	user->uid = entry->pw_uid;
	user->gid = entry->pw_gid;
	user->name = strdup(entry->pw_name);
	user->home = strdup(entry->pw_dir && *entry->pw_dir ? entry->pw_dir : "/");
	user->shell = strdup(entry->pw_shell && *entry->pw_shell ? entry->pw_shell : "/bin/sh");
}

struct name_buffer {
	char *out;
	size_t size;
};

static void take_name(const struct passwd *entry, void *out)
{
	struct name_buffer *buffer = out;

	snprintf(buffer->out, buffer->size, "%s", entry->pw_name);
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

static void add_groups(struct user *user)
{
	FILE *file = fopen(group_file, "re");
	struct group *entry;
	char **member;

	add_group(user, user->gid);
	if (!file)
		return;
	while ((entry = fgetgrent(file)))
		for (member = entry->gr_mem; member && *member; member++)
			if (strcmp(*member, user->name) == 0)
				add_group(user, entry->gr_gid);
	fclose(file);
}

bool user_lookup(const char *name, struct user *user)
{
	memset(user, 0, sizeof *user);
	if (!find_passwd(has_name, name, take_user, user)) {
		if (strcmp(name, "root") != 0)
			return false;
		user->name = strdup("root");
		user->home = strdup("/root");
		user->shell = strdup("/bin/sh");
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

void user_name(uid_t uid, char *out, size_t size)
{
	struct name_buffer buffer = {out, size};

	if (!find_passwd(has_uid, &uid, take_name, &buffer))
		snprintf(out, size, "%u", (unsigned)uid);
}

void group_name(gid_t gid, char *out, size_t size)
{
	FILE *file = fopen(group_file, "re");
	struct group *entry;

	snprintf(out, size, "%u", (unsigned)gid);
	if (!file)
		return;
	while ((entry = fgetgrent(file)))
		if (entry->gr_gid == gid) {
			snprintf(out, size, "%s", entry->gr_name);
			break;
		}
	fclose(file);
}
