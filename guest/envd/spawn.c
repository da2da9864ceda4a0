/* vfork: the agent's pages are not copied, and the child, which shares our memory until exec, reports what went wrong
 * by writing it there. In the child only system calls are made, through thin wrappers: no allocation, no stdio. */
#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env.h"

struct plan {
	const struct spawn_request *request;
	char **candidates;         /* files to try, in PATH's order */
	int in, out, err;          /* the child's ends */
	volatile int error;
	volatile enum spawn_stage stage;
};

/* ---- before the fork ---- */

static void free_candidates(struct plan *plan)
{
	char **at;

	for (at = plan->candidates; at && *at; at++)
		free(*at);
	free(plan->candidates);
}

static bool add_candidate(struct plan *plan, size_t n, const char *folder, size_t len, const char *file)
{
	char **more = realloc(plan->candidates, (n + 2) * sizeof *more);

	if (!more)
		return false;
	plan->candidates = more;
	more[n + 1] = NULL;
	if (len == 0) /* an empty entry of PATH is the working directory */
		return (more[n] = strdup(file)) != NULL;
	more[n] = malloc(len + strlen(file) + 2);
	if (!more[n])
		return false;
	memcpy(more[n], folder, len);
	more[n][len] = '/';
	strcpy(more[n] + len + 1, file);
	return true;
}

static bool find_candidates(struct plan *plan)
{
	const char *file = plan->request->argv[0], *at = env_get(plan->request->env, "PATH");
	size_t n = 0;

	if (strchr(file, '/') || !at)
		return add_candidate(plan, 0, "", 0, file);
	for (;; at++) {
		size_t len = strcspn(at, ":");

		if (!add_candidate(plan, n++, at, len, file))
			return false;
		at += len;
		if (!*at)
			return true;
	}
}

/* ---- in the child ---- */

static void give_up(struct plan *plan, enum spawn_stage stage)
{
	plan->error = errno;
	plan->stage = stage;
	_exit(127);
}

static void reset_signals(void)
{
	struct sigaction normal = {.sa_handler = SIG_DFL};
	sigset_t none;

	sigaction(SIGPIPE, &normal, NULL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static void set_oom_score(const char *text)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return; /* no /proc: nothing is lost but the kernel's choice of a victim */
	if (write(fd, text, strlen(text)) < 0)
		errno = 0;
	close(fd);
}

/* Raw system calls: glibc's wrappers would change the identity of every thread of the process we still share. */
static bool become(const struct user *user)
{
	return syscall(SYS_setgroups, user->n_groups, user->groups) == 0 &&
	       syscall(SYS_setresgid, user->gid, user->gid, user->gid) == 0 &&
	       syscall(SYS_setresuid, user->uid, user->uid, user->uid) == 0;
}

static void try_exec(struct plan *plan)
{
	int worst = ENOENT;
	char **file;

	for (file = plan->candidates; *file; file++) {
		execve(*file, plan->request->argv, plan->request->env);
		if (errno != ENOENT && errno != ENOTDIR) {
			worst = errno;
			if (errno != EACCES)
				break;
		}
	}
	errno = worst;
}

static void run_child(struct plan *plan)
{
	const struct spawn_request *request = plan->request;

	setsid();
	if (request->pty && ioctl(plan->in, TIOCSCTTY, 0) < 0)
		give_up(plan, SPAWN_RESOURCES);
	if (dup2(plan->in, 0) < 0 || dup2(plan->out, 1) < 0 || dup2(plan->err, 2) < 0)
		give_up(plan, SPAWN_RESOURCES);
	if (request->oom_score_adj)
		set_oom_score(request->oom_score_adj);
	setrlimit(RLIMIT_NOFILE, &request->files);
	if (request->user && !become(request->user))
		give_up(plan, SPAWN_IDENTITY);
	if (chdir(request->cwd) < 0)
		give_up(plan, SPAWN_CWD);
	reset_signals();
	try_exec(plan);
	give_up(plan, SPAWN_EXEC);
}

/* ---- descriptors ---- */

static void close_all(int *fds, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

static int nonblocking(int fd)
{
	return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static int open_pipes(struct plan *plan, struct spawn_result *result)
{
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
	int all[6], error;
	bool fine;

	if (plan->request->stdin_open)
		fine = pipe2(in, O_CLOEXEC) == 0;
	else
		fine = (in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;
	fine = fine && pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0;
	fine = fine && (in[1] < 0 || nonblocking(in[1]) == 0) && nonblocking(out[0]) == 0 && nonblocking(err[0]) == 0;
	if (!fine) {
		error = errno;
		memcpy(all, in, sizeof in);
		memcpy(all + 2, out, sizeof out);
		memcpy(all + 4, err, sizeof err);
		close_all(all, 6);
		return error;
	}
	plan->in = in[0];
	plan->out = out[1];
	plan->err = err[1];
	result->in = in[1];
	result->out = out[0];
	result->err = err[0];
	return 0;
}

static int open_terminal(struct plan *plan, struct spawn_result *result)
{
	const struct spawn_request *request = plan->request;
	struct winsize size = {.ws_col = request->cols, .ws_row = request->rows};
	int unlock = 0, master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), slave = -1;

	/* TIOCGPTPEER opens the other end by descriptor: right even where /dev/pts is not the one of this instance. */
	if (master >= 0 && ioctl(master, TIOCSPTLCK, &unlock) == 0)
		slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0 || ioctl(master, TIOCSWINSZ, &size) < 0) {
		int error = errno, both[2] = {master, slave};

		close_all(both, 2);
		return error;
	}
	if (request->user && fchown(slave, request->user->uid, (gid_t)-1) < 0)
		errno = 0; /* the terminal works all the same; only its name in /dev/pts belongs to root */
	plan->in = plan->out = plan->err = slave;
	result->out = master;
	return 0;
}

static void close_child_ends(struct plan *plan)
{
	close(plan->in);
	if (plan->out != plan->in) {
		close(plan->out);
		close(plan->err);
	}
}

static void close_our_ends(struct spawn_result *result)
{
	int fds[3] = {result->in, result->out, result->err};

	close_all(fds, 3);
	result->in = result->out = result->err = -1;
}

int spawn_process(const struct spawn_request *request, struct spawn_result *result)
{
	struct plan plan = {.request = request, .in = -1, .out = -1, .err = -1};
	pid_t pid;

	*result = (struct spawn_result){.pid = -1, .in = -1, .out = -1, .err = -1, .stage = SPAWN_RESOURCES};
	plan.error = find_candidates(&plan) ? 0 : ENOMEM;
	if (!plan.error)
		plan.error = request->pty ? open_terminal(&plan, result) : open_pipes(&plan, result);
	if (plan.error) {
		free_candidates(&plan);
		return plan.error;
	}
	pid = vfork();
	if (pid == 0)
		run_child(&plan);
	if (pid < 0)
		plan.error = errno;
	close_child_ends(&plan);
	free_candidates(&plan);
	if (plan.error) {
		result->stage = pid < 0 ? SPAWN_RESOURCES : plan.stage;
		close_our_ends(result);
		if (pid > 0) /* it has exited already: vfork returned after that */
			while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
				;
		return plan.error;
	}
	result->pid = pid;
	return 0;
}
