#define _GNU_SOURCE
#include "init_system.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_SECOND 1000000000LL
#define MAX_BEHIND_NS (NS_PER_SECOND / 20)
#define MAX_AHEAD_NS (5 * NS_PER_SECOND)
#define HOSTS_MARK "# this sandbox"
enum { MAX_FILE = 64 * 1024 };

static void complain(const char *what)
{
	fprintf(stderr, "envd: %s: %s\n", what, strerror(errno));
}

void system_set_clock(int64_t wanted)
{
	struct timespec now, time = {wanted / NS_PER_SECOND, wanted % NS_PER_SECOND};
	int64_t ahead;

	clock_gettime(CLOCK_REALTIME, &now);
	ahead = (int64_t)now.tv_sec * NS_PER_SECOND + now.tv_nsec - wanted;
	if (ahead >= -MAX_BEHIND_NS && ahead <= MAX_AHEAD_NS)
		return;
	if (clock_settime(CLOCK_REALTIME, &time) < 0)
		complain("setting the clock");
}

void system_add_entropy(const uint8_t *data, size_t len)
{
	struct {
		struct rand_pool_info info;
		uint8_t data[SYSTEM_MAX_ENTROPY]; /* where info.buf begins */
	} pool = {.info = {.entropy_count = (int)len * 8, .buf_size = (int)len}};
	int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);

	memcpy(pool.data, data, len);
	if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0)
		complain("reseeding the random pool");
	if (fd >= 0)
		close(fd);
	explicit_bzero(&pool, sizeof pool);
}

void system_set_hostname(const char *name)
{
	if (sethostname(name, strlen(name)) < 0)
		complain("setting the host name");
}

/* ---- files: the image's owner may have put anything there, so links are not followed ---- */

/* The content, malloc'ed and NUL-terminated; NULL when there is no such file of a sane size. */
static char *read_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	char *text = fd < 0 ? NULL : malloc(MAX_FILE + 1);
	ssize_t got = text ? read(fd, text, MAX_FILE) : -1;

	if (fd >= 0)
		close(fd);
	if (got < 0 || got == MAX_FILE || memchr(text, 0, (size_t)got)) {
		free(text);
		return NULL;
	}
	text[got] = 0;
	return text;
}

/* Replaces the file unless it is as wanted already: a resumed guest need not dirty its disk. An image without the
 * directory needs no such file. */
static void write_file(const char *path, const char *text, mode_t mode)
{
	char *before = read_file(path);
	bool same = before && strcmp(before, text) == 0;
	int fd;

	free(before);
	if (same)
		return;
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, mode);
	if (fd < 0 && errno == ENOENT)
		return;
	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		complain(path);
	if (fd >= 0)
		close(fd);
}

/* The lines of `before` but ours, then ours for `name`; malloc'ed. */
static char *hosts_with(const char *before, const char *name)
{
	size_t size = strlen(before) + strlen(name) + 64;
	char *after = calloc(1, size), *at = after;
	size_t len;

	if (!after)
		return NULL;
	for (; *before; before += len) {
		len = strcspn(before, "\n") + 1;
		if (!before[len - 1]) /* the last line, without its end */
			len--;
		if (!memmem(before, len, HOSTS_MARK, strlen(HOSTS_MARK)))
			at = mempcpy(at, before, len);
	}
	if (at > after && at[-1] != '\n')
		*at++ = '\n';
	snprintf(at, size - (size_t)(at - after), "127.0.1.1\t%s %s\n", name, HOSTS_MARK);
	return after;
}

void system_write_hosts(const char *name)
{
	char *before = read_file("/etc/hosts"), *after;

	if (!before && access("/etc/hosts", F_OK) == 0)
		return; /* something else than a plain small file: not ours to replace */
	after = hosts_with(before ? before : "", name);
	if (after)
		write_file("/etc/hosts", after, 0644);
	free(before);
	free(after);
}

void system_write_machine_id(const char *id)
{
	char line[40];

	snprintf(line, sizeof line, "%s\n", id);
	write_file("/etc/machine-id", line, 0444);
}

void system_mark_sandbox(void)
{
	if (mkdir("/run/e2b", 0755) < 0 && errno != EEXIST) {
		complain("/run/e2b");
		return;
	}
	write_file("/run/e2b/.E2B_SANDBOX", "true", 0444);
}
