/* How the end of a process is told: the texts are those of Go's os.ProcessState, which SDKs compare. */
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "process.h"

static const char *signal_text(int number, char *buffer, size_t size)
{
	static const char *const names[] = {
		[SIGHUP] = "hangup", [SIGINT] = "interrupt", [SIGQUIT] = "quit", [SIGILL] = "illegal instruction",
		[SIGTRAP] = "trace/breakpoint trap", [SIGABRT] = "aborted", [SIGBUS] = "bus error",
		[SIGFPE] = "floating point exception", [SIGKILL] = "killed", [SIGUSR1] = "user defined signal 1",
		[SIGSEGV] = "segmentation fault", [SIGUSR2] = "user defined signal 2", [SIGPIPE] = "broken pipe",
		[SIGALRM] = "alarm clock", [SIGTERM] = "terminated",
	};

	if (number > 0 && (size_t)number < sizeof names / sizeof *names && names[number])
		return names[number];
	snprintf(buffer, size, "signal %d", number);
	return buffer;
}

void process_status_text(int status, char *out, size_t size)
{
	char number[32];

	if (WIFSIGNALED(status))
		snprintf(out, size, "signal: %s%s", signal_text(WTERMSIG(status), number, sizeof number),
			 WCOREDUMP(status) ? " (core dumped)" : "");
	else
		snprintf(out, size, "exit status %d", WEXITSTATUS(status));
}

size_t process_end_event(int status, char *out, size_t size)
{
	bool exited = WIFEXITED(status);
	int code = exited ? WEXITSTATUS(status) : -1;
	char text[64], error[96] = "";

	process_status_text(status, text, sizeof text);
	if (code != 0)
		snprintf(error, sizeof error, ",\"error\":\"%s\"", text);
	return (size_t)snprintf(out, size, "{\"event\":{\"end\":{\"exitCode\":%d,\"exited\":%s,\"status\":\"%s\"%s}}}", code,
				exited ? "true" : "false", text, error);
}
