/* Starting a process: pipes or a terminal, the user's identity, and exec errors that reach the caller. */
#ifndef ENVD_SPAWN_H
#define ENVD_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "users.h"

struct spawn_request {
	char *const *argv;         /* argv[0] is looked up in PATH of env unless it holds a slash */
	char *const *env;
	const char *cwd;
	const struct user *user;   /* NULL: keep our own identity */
	bool stdin_open;           /* pipes: false = /dev/null */
	bool pty;
	uint16_t cols, rows;
	struct rlimit files;       /* RLIMIT_NOFILE of the process */
	const char *oom_score_adj; /* text for /proc/self/oom_score_adj, NULL: leave it */
};

enum spawn_stage { SPAWN_RESOURCES, SPAWN_IDENTITY, SPAWN_CWD, SPAWN_EXEC };

struct spawn_result {
	pid_t pid;
	int in, out, err;          /* our ends, non-blocking; -1: none. A terminal has only `out`, used both ways */
	enum spawn_stage stage;    /* what failed */
};

/* 0, or an errno with result->stage set and nothing left behind. */
int spawn_process(const struct spawn_request *request, struct spawn_result *result);

#endif
