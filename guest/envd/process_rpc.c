/* process.Process: the RPC face of process.c. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "env.h"
#include "http.h"
#include "jsonx.h"
#include "path.h"
#include "process.h"
#include "rpc.h"

/* ---- which process ---- */

struct selector {
	uint32_t pid;
	const char *tag;
};

static bool parse_selector(struct rpc_call *call, json_t *request, struct selector *selector)
{
	json_t *which = NULL;
	enum jx pid, tag;

	*selector = (struct selector){0, NULL};
	if (jx_object(request, "process", &which) != JX_OK) {
		rpc_fail(call, RPC_INVALID_ARGUMENT, "process: a selector is needed");
		return false;
	}
	pid = jx_u32(which, "pid", &selector->pid);
	tag = jx_string(which, "tag", &selector->tag);
	if (pid == JX_BAD || tag == JX_BAD || (pid == JX_OK) == (tag == JX_OK)) {
		rpc_fail(call, RPC_INVALID_ARGUMENT, "process: exactly one of pid (a number) and tag (a string) is needed");
		return false;
	}
	return true;
}

static struct process *select_process(struct rpc_call *call, json_t *request, bool ended_too)
{
	struct selector selector;
	struct process *process;

	if (!parse_selector(call, request, &selector))
		return NULL;
	process = process_find(call->envd->processes, selector.pid, selector.tag, ended_too);
	if (process)
		return process;
	if (selector.tag)
		return rpc_fail(call, RPC_NOT_FOUND, "process with tag %s not found", selector.tag);
	return rpc_fail(call, RPC_NOT_FOUND, "process with pid %u not found", selector.pid);
}

/* ---- Start ---- */

struct start {
	const char *cmd, *cwd, *tag;
	json_t *args, *envs, *config;
	bool stdin_open, pty;
	uint16_t cols, rows;
};

static bool bad(struct rpc_call *call, const char *what)
{
	rpc_fail(call, RPC_INVALID_ARGUMENT, "%s", what);
	return false;
}

/* PTY{size{cols, rows}}; false after rpc_fail(). */
static bool parse_size(struct rpc_call *call, json_t *pty, uint16_t *cols, uint16_t *rows)
{
	json_t *size = NULL;
	uint32_t width = 0, height = 0;

	if (jx_object(pty, "size", &size) == JX_BAD)
		return bad(call, "pty.size: must be an object");
	if (size && (jx_u32(size, "cols", &width) == JX_BAD || width > UINT16_MAX))
		return bad(call, "pty.size.cols: must be a number up to 65535");
	if (size && (jx_u32(size, "rows", &height) == JX_BAD || height > UINT16_MAX))
		return bad(call, "pty.size.rows: must be a number up to 65535");
	*cols = (uint16_t)width;
	*rows = (uint16_t)height;
	return true;
}

static bool strings_only(const json_t *array)
{
	size_t i;

	for (i = 0; i < json_array_size(array); i++)
		if (!json_is_string(json_array_get(array, i)))
			return false;
	return true;
}

static bool parse_config(struct rpc_call *call, json_t *request, struct start *start)
{
	if (jx_object(request, "process", &start->config) != JX_OK)
		return bad(call, "process: a configuration is needed");
	if (jx_string(start->config, "cmd", &start->cmd) != JX_OK || !*start->cmd)
		return bad(call, "process.cmd: a command is needed");
	if (jx_array(start->config, "args", &start->args) == JX_BAD || !strings_only(start->args))
		return bad(call, "process.args: must be a list of strings");
	if (jx_object(start->config, "envs", &start->envs) == JX_BAD || (start->envs && !env_valid(start->envs)))
		return bad(call, "process.envs: must map names (not empty, without '=') to strings");
	if (jx_string(start->config, "cwd", &start->cwd) == JX_BAD)
		return bad(call, "process.cwd: must be a string");
	return true;
}

static bool parse_start(struct rpc_call *call, json_t *request, struct start *start)
{
	json_t *pty = NULL;

	*start = (struct start){.cwd = "", .stdin_open = true};
	if (!parse_config(call, request, start))
		return false;
	if (jx_string(request, "tag", &start->tag) == JX_BAD)
		return bad(call, "tag: must be a string");
	if (jx_bool(request, "stdin", &start->stdin_open) == JX_BAD)
		return bad(call, "stdin: must be true or false");
	if (jx_object(request, "pty", &pty) == JX_BAD)
		return bad(call, "pty: must be an object");
	start->pty = pty != NULL;
	return !pty || parse_size(call, pty, &start->cols, &start->rows);
}

static bool resolve_cwd(struct rpc_call *call, const struct start *start, const struct user *user, char out[PATH_MAX])
{
	enum path_status status =
		path_resolve(start->cwd, strlen(start->cwd), user->home, call->envd->default_workdir, out);
	struct stat info;

	if (status != PATH_OK) {
		rpc_fail(call, RPC_INVALID_ARGUMENT, "process.cwd: %s", path_status_text(status));
		return false;
	}
	if (stat(out, &info) == 0 && S_ISDIR(info.st_mode))
		return true;
	if (!*start->cwd && !call->envd->default_workdir) { /* nobody asked for this place: a user may have no home */
		strcpy(out, "/");
		return true;
	}
	rpc_fail(call, RPC_INVALID_ARGUMENT, "cwd '%s' %s", out,
		 access(out, F_OK) == 0 ? "is not a directory" : "does not exist");
	return false;
}

static void fail_spawn(struct rpc_call *call, const struct start *start, const char *cwd, int error,
		       enum spawn_stage stage)
{
	switch (stage) {
	case SPAWN_EXEC:
		rpc_fail(call, error == ENOENT ? RPC_NOT_FOUND : RPC_INVALID_ARGUMENT, "error starting process '%s': %s",
			 start->cmd, strerror(error));
		break;
	case SPAWN_CWD:
		rpc_fail(call, RPC_INVALID_ARGUMENT, "cwd '%s' cannot be entered: %s", cwd, strerror(error));
		break;
	case SPAWN_IDENTITY:
		rpc_fail(call, RPC_INTERNAL, "cannot become the user: %s", strerror(error));
		break;
	default:
		rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "error starting process: %s", strerror(error));
	}
}

static char **build_argv(const struct start *start)
{
	size_t n = json_array_size(start->args), i;
	char **argv = calloc(n + 2, sizeof *argv);

	if (!argv)
		return NULL;
	argv[0] = (char *)start->cmd;
	for (i = 0; i < n; i++)
		argv[i + 1] = (char *)json_string_value(json_array_get(start->args, i));
	return argv;
}

static bool launch(struct rpc_call *call, const struct start *start, const struct user *user,
		   struct spawn_result *result)
{
	char cwd[PATH_MAX], **argv, **env;
	int error = ENOMEM;

	if (geteuid() != 0 && user->uid != geteuid()) {
		rpc_fail(call, RPC_PERMISSION_DENIED, "the agent is not root and cannot become user '%s'", user->name);
		return false;
	}
	if (!resolve_cwd(call, start, user, cwd))
		return false;
	argv = build_argv(start);
	env = env_build(call->envd, user, start->envs);
	result->stage = SPAWN_RESOURCES;
	if (argv && env) {
		struct spawn_request request = {
			.argv = argv, .env = env, .cwd = cwd, .user = geteuid() == 0 ? user : NULL,
			.stdin_open = start->stdin_open, .pty = start->pty, .cols = start->cols, .rows = start->rows,
			.files = call->envd->file_limit, .oom_score_adj = processes_oom_score(call->envd->processes),
		};

		error = spawn_process(&request, result);
	}
	if (error)
		fail_spawn(call, start, cwd, error, result->stage);
	free(argv);
	env_free(env);
	return error == 0;
}

static void start_stream(struct rpc_stream *stream, json_t *request)
{
	struct rpc_call *call = &stream->call;
	struct spawn_result spawned;
	struct process *process = NULL;
	struct start start;
	struct user user;
	bool launched;

	if (!parse_start(call, request, &start) || !rpc_user(call, &user)) {
		rpc_stream_fail_call(stream);
		return;
	}
	launched = launch(call, &start, &user, &spawned);
	user_clear(&user);
	if (launched)
		process = process_add(call->envd->processes, &spawned, start.pty, start.config, start.tag);
	if (!launched) {
		rpc_stream_fail_call(stream);
	} else if (!process || !process_subscribe(process, stream)) {
		if (process)
			process_signal(process, SIGKILL);
		rpc_stream_fail(stream, RPC_RESOURCE_EXHAUSTED, "out of memory");
	} else {
		process_kill_after(process, stream, rpc_timeout_ms(call));
	}
}

static void connect_stream(struct rpc_stream *stream, json_t *request)
{
	struct process *process = select_process(&stream->call, request, true);

	if (!process)
		rpc_stream_fail_call(stream);
	else if (!process_subscribe(process, stream))
		rpc_stream_fail(stream, RPC_RESOURCE_EXHAUSTED, "out of memory");
	else
		process_subscription_ends_after(stream, rpc_timeout_ms(&stream->call));
}

/* ---- List, Update, SendSignal ---- */

/* ProcessConfig as it was understood, without what the client sent besides. */
static json_t *config_json(const json_t *config)
{
	static const char *const names[] = {"cmd", "args", "envs", "cwd"};
	json_t *out = json_object();
	size_t i;

	for (i = 0; i < sizeof names / sizeof *names; i++)
		if (jx_get(config, names[i]))
			json_object_set(out, names[i], jx_get(config, names[i]));
	return out;
}

static json_t *list(struct rpc_call *call, json_t *request)
{
	json_t *processes = json_array();
	struct process *process;

	for (process = process_first(call->envd->processes); process; process = process_next(process)) {
		json_t *info = json_pack("{s:o, s:i}", "config", config_json(process->config), "pid",
					 (int)process->pid);

		if (process->tag)
			json_object_set_new(info, "tag", json_string(process->tag));
		json_array_append_new(processes, info);
	}
	return json_pack("{s:o}", "processes", processes);
}

static json_t *update(struct rpc_call *call, json_t *request)
{
	struct process *process = select_process(call, request, false);
	json_t *pty = NULL;
	uint16_t cols, rows;
	int error;

	if (!process)
		return NULL;
	if (jx_object(request, "pty", &pty) == JX_BAD)
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "pty: must be an object");
	if (!pty)
		return json_object();
	if (!parse_size(call, pty, &cols, &rows))
		return NULL;
	if (!process->pty || process->outputs[0].fd < 0)
		return rpc_fail(call, RPC_INTERNAL, "tty not assigned to process");
	error = process_resize(process, cols, rows);
	return error ? rpc_fail_errno(call, error, "error resizing tty") : json_object();
}

/* Enum Signal: names or numbers. 0: neither of the two known. */
static int parse_signal(const json_t *request)
{
	const char *name = "";
	uint32_t number = 0;

	if (jx_u32(request, "signal", &number) == JX_OK)
		return number == SIGTERM || number == SIGKILL ? (int)number : 0;
	if (jx_string(request, "signal", &name) != JX_OK)
		return 0;
	if (strcmp(name, "SIGNAL_SIGTERM") == 0)
		return SIGTERM;
	return strcmp(name, "SIGNAL_SIGKILL") == 0 ? SIGKILL : 0;
}

static json_t *send_signal(struct rpc_call *call, json_t *request)
{
	struct process *process = select_process(call, request, false);
	int number = parse_signal(request), error;

	if (!process)
		return NULL;
	if (number == 0)
		return rpc_fail(call, RPC_INVALID_ARGUMENT, "signal: must be SIGNAL_SIGTERM or SIGNAL_SIGKILL");
	error = process_signal(process, number);
	return error ? rpc_fail_errno(call, error, "error sending signal") : json_object();
}

/* ---- input ---- */

/* ProcessInput{stdin | pty} of a message: writes it. False after rpc_fail(). */
static bool write_input(struct rpc_call *call, struct process *process, json_t *message)
{
	uint8_t *data = NULL;
	json_t *input = NULL;
	size_t len = 0;
	enum jx as_stdin = JX_ABSENT, as_pty = JX_ABSENT;
	int error;

	if (jx_object(message, "input", &input) != JX_OK)
		return bad(call, "input: is needed");
	as_stdin = jx_bytes(input, "stdin", &data, &len);
	if (as_stdin == JX_ABSENT)
		as_pty = jx_bytes(input, "pty", &data, &len);
	if (as_stdin == JX_BAD || as_pty == JX_BAD)
		return bad(call, "input: must be base64");
	if (as_stdin == JX_ABSENT && as_pty == JX_ABSENT)
		return bad(call, "input: one of stdin and pty is needed");
	if (as_pty == JX_OK && !process->pty) {
		rpc_fail(call, RPC_INTERNAL, "error writing to tty: tty not assigned to process");
	} else if (as_stdin == JX_OK && process->pty) {
		rpc_fail(call, RPC_INTERNAL, "error writing to stdin: stdin not enabled or closed");
	} else {
		error = process_write(process, data, len);
		if (error == EPIPE)
			rpc_fail(call, RPC_INTERNAL, "error writing to %s: stdin not enabled or closed",
				 process->pty ? "tty" : "stdin");
		else if (error)
			rpc_fail(call, RPC_RESOURCE_EXHAUSTED, "the process does not read its input");
	}
	free(data);
	return call->code == RPC_OK;
}

/* A SendInput whose bytes the process has not read yet: the answer waits, so that the client sends no more. */
struct pending_input {
	struct input_waiter waiter;
	struct rpc_call *call;
};

static void pending_done(struct input_waiter *waiter, int error)
{
	struct pending_input *pending = waiter->data;
	struct rpc_call *call = pending->call;

	free(pending);
	if (error)
		rpc_fail(call, RPC_INTERNAL, "error writing to stdin: stdin not enabled or closed");
	rpc_finish(call, error ? NULL : json_object());
}

static void pending_close(struct rpc_call *call)
{
	struct pending_input *pending = call->state;

	LIST_REMOVE(&pending->waiter, link);
	free(pending);
}

static json_t *send_input(struct rpc_call *call, json_t *request)
{
	struct process *process = select_process(call, request, false);
	struct pending_input *pending;

	if (!process || !write_input(call, process, request))
		return NULL;
	if (process_input_pending(process) == 0)
		return json_object();
	pending = calloc(1, sizeof *pending);
	if (!pending)
		return json_object();
	pending->waiter.done = pending_done;
	pending->waiter.data = pending;
	pending->call = call;
	call->state = pending;
	call->on_close = pending_close;
	process_wait_input(process, &pending->waiter);
	return rpc_defer(call);
}

static json_t *close_stdin(struct rpc_call *call, json_t *request)
{
	struct process *process = select_process(call, request, false);

	if (!process)
		return NULL;
	if (process->pty)
		return rpc_fail(call, RPC_UNKNOWN, "stdin of a terminal cannot be closed: send Ctrl+D (0x04) instead");
	process_close_input(process);
	return json_object();
}

/* ---- StreamInput ---- */

struct input_stream {
	struct input_waiter waiter;
	bool waiting;
	struct selector selector;  /* the process may end and its record go between two messages */
};

static void input_stream_go_on(struct input_waiter *waiter, int error)
{
	struct rpc_upload *upload = waiter->data;

	((struct input_stream *)upload->state)->waiting = false;
	rpc_upload_resume(upload); /* on error the next message says so */
}

static bool input_stream_start(struct rpc_upload *upload, json_t *start)
{
	struct input_stream *stream = calloc(1, sizeof *stream);
	struct process *process = select_process(&upload->call, start, false);

	if (!stream || !process) {
		free(stream);
		return false;
	}
	stream->selector.pid = (uint32_t)process->pid;
	stream->waiter.done = input_stream_go_on;
	stream->waiter.data = upload;
	upload->state = stream;
	return true;
}

static bool input_stream_data(struct rpc_upload *upload, json_t *data)
{
	struct input_stream *stream = upload->state;
	struct process *process = process_find(upload->call.envd->processes, stream->selector.pid, NULL, false);

	if (!process) {
		rpc_fail(&upload->call, RPC_NOT_FOUND, "process with pid %u not found", stream->selector.pid);
		return false;
	}
	if (!write_input(&upload->call, process, data))
		return false;
	if (!stream->waiting && process_input_pending(process) > HTTP_HIGH_WATER) {
		stream->waiting = true;
		process_wait_input(process, &stream->waiter);
		rpc_upload_pause(upload);
	}
	return true;
}

static bool input_stream_message(struct rpc_upload *upload, json_t *message)
{
	json_t *part = NULL;

	if (jx_object(message, "start", &part) == JX_OK) {
		if (!upload->state)
			return input_stream_start(upload, part);
		return bad(&upload->call, "start: comes only once");
	}
	if (!upload->state)
		return bad(&upload->call, "start: must be the first message");
	if (jx_object(message, "data", &part) == JX_OK)
		return input_stream_data(upload, part);
	if (jx_get(message, "keepalive"))
		return true;
	return bad(&upload->call, "one of start, data and keepalive is needed");
}

static json_t *input_stream_done(struct rpc_upload *upload)
{
	if (!upload->state)
		return rpc_fail(&upload->call, RPC_INVALID_ARGUMENT, "start: must be the first message");
	return json_object();
}

static void input_stream_close(struct rpc_upload *upload)
{
	struct input_stream *stream = upload->state;

	if (stream && stream->waiting)
		LIST_REMOVE(&stream->waiter, link);
	free(stream);
}

void process_register(struct envd *envd)
{
	static const struct rpc_upload_handlers stream_input = {input_stream_message, input_stream_done,
								input_stream_close};

	rpc_unary(envd, "/process.Process/List", list);
	rpc_server_stream(envd, "/process.Process/Connect", connect_stream);
	rpc_server_stream(envd, "/process.Process/Start", start_stream);
	rpc_unary(envd, "/process.Process/Update", update);
	rpc_client_stream(envd, "/process.Process/StreamInput", &stream_input);
	rpc_unary(envd, "/process.Process/SendInput", send_input);
	rpc_unary(envd, "/process.Process/SendSignal", send_signal);
	rpc_unary(envd, "/process.Process/CloseStdin", close_stdin);
}
