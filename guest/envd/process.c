#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nettle/base64.h>

enum {
	PIPE_CHUNK = 32 * 1024,
	PTY_CHUNK = 16 * 1024,
	READ_BURST = 4,              /* chunks of one output before the loop turns to others */
	DRAIN_CHUNKS = 8,            /* more than a pipe (64 KiB) or a terminal can hold */
	GRACE_MS = 200,              /* after exit, output held open by others is read until it is silent that long */
	MAX_GRACES = 10,
	STALL_SECONDS = 15,          /* a reader that takes nothing for so long is cut off */
	RETAIN_SECONDS = 30,
	MAX_RETAINED = 512,          /* the oldest go first */
};

TAILQ_HEAD(process_list, process);

struct processes {
	struct envd *envd;
	struct process_list list;    /* oldest first */
	size_t n_ended;
	char oom_score[16];
	uint8_t raw[PIPE_CHUNK];
	char message[sizeof "{\"event\":{\"data\":{\"stdout\":\"\"}}}" + BASE64_ENCODE_RAW_LENGTH(PIPE_CHUNK)];
};

static void drain(struct process *process);
static void process_free(struct process *process);
static void process_forget(struct process *process);

struct event_base *process_base(struct process *process)
{
	return process->owner->envd->base;
}

static void after_ms(struct event *event, uint64_t milliseconds)
{
	struct timeval time = {(time_t)(milliseconds / 1000), (suseconds_t)(milliseconds % 1000 * 1000)};

	event_add(event, &time);
}

/* ---- subscribers ---- */

static bool anyone_full(const struct process *process)
{
	const struct subscriber *subscriber;

	LIST_FOREACH(subscriber, &process->subscribers, link)
		if (subscriber->full)
			return true;
	return false;
}

static void read_outputs(struct process *process, bool on)
{
	size_t i;

	for (i = 0; i < 2; i++) {
		struct output *output = &process->outputs[i];

		if (output->fd < 0 || output->reading == on)
			continue;
		if (on)
			event_add(&output->event, NULL);
		else
			event_del(&output->event);
		output->reading = on;
	}
}

/* Nobody is behind any more: read on, and finish what waited for it. */
static void output_continues(struct process *process)
{
	if (anyone_full(process))
		return;
	read_outputs(process, true);
	if (process->state == PROCESS_DRAINING)
		drain(process);
}

static void subscriber_detach(struct subscriber *subscriber)
{
	struct process *process = subscriber->process;

	event_del(&subscriber->stall);
	event_del(&subscriber->deadline);
	if (!process)
		return;
	LIST_REMOVE(subscriber, link);
	subscriber->process = NULL;
	if (subscriber->full)
		output_continues(process);
}

static void on_stream_close(struct rpc_stream *stream)
{
	struct subscriber *subscriber = stream->state;

	subscriber_detach(subscriber);
	free(subscriber);
}

static void on_stream_drain(struct rpc_stream *stream)
{
	struct subscriber *subscriber = stream->state;

	if (!subscriber->full)
		return;
	subscriber->full = false;
	event_del(&subscriber->stall);
	if (subscriber->process)
		output_continues(subscriber->process);
}

/* Ends a subscription that the process does not end. */
static void subscriber_fail(struct subscriber *subscriber, enum rpc_code code, const char *message)
{
	rpc_stream_fail(subscriber->stream, code, "%s", message);
	subscriber_detach(subscriber);
}

static void on_stall(evutil_socket_t fd, short what, void *arg)
{
	struct subscriber *subscriber = arg;
	size_t pending = rpc_stream_pending(subscriber->stream);
	bool alone = !LIST_NEXT(LIST_FIRST(&subscriber->process->subscribers), link);

	if (alone && pending < subscriber->pending) { /* slow, but it reads, and nobody else has to wait for it */
		subscriber->pending = pending;
		after_ms(&subscriber->stall, STALL_SECONDS * 1000);
		return;
	}
	subscriber_fail(subscriber, RPC_RESOURCE_EXHAUSTED, "the output was not read in time; connect again to go on");
}

static void on_subscriber_deadline(evutil_socket_t fd, short what, void *arg)
{
	subscriber_fail(arg, RPC_DEADLINE_EXCEEDED, "the deadline of this stream has passed");
}

static void check_full(struct subscriber *subscriber)
{
	if (subscriber->full || !rpc_stream_full(subscriber->stream))
		return;
	subscriber->full = true;
	subscriber->pending = rpc_stream_pending(subscriber->stream);
	after_ms(&subscriber->stall, STALL_SECONDS * 1000);
	read_outputs(subscriber->process, false);
}

static void send_to_all(struct process *process, const char *text, size_t len)
{
	struct subscriber *subscriber;

	LIST_FOREACH(subscriber, &process->subscribers, link) {
		rpc_stream_send_text(subscriber->stream, text, len);
		check_full(subscriber);
	}
}

/* ---- output ---- */

static void output_close(struct output *output)
{
	if (output->fd < 0)
		return;
	if (output->reading)
		event_del(&output->event);
	output->reading = false;
	if (output->kind == OUTPUT_PTY)
		process_close_input(output->process); /* the same descriptor: close it once, here */
	close(output->fd);
	output->fd = -1;
}

static void send_output(struct output *output, size_t len)
{
	static const char *const names[] = {"stdout", "stderr", "pty"};
	struct processes *processes = output->process->owner;
	char *at = processes->message;

	if (LIST_EMPTY(&output->process->subscribers))
		return;
	at += sprintf(at, "{\"event\":{\"data\":{\"%s\":\"", names[output->kind]);
	base64_encode_raw(at, len, processes->raw);
	at += BASE64_ENCODE_RAW_LENGTH(len);
	memcpy(at, "\"}}}", 4);
	send_to_all(output->process, processes->message, (size_t)(at + 4 - processes->message));
}

/* Reads one chunk and passes it on. False: nothing there now, or the end. */
static bool output_read(struct output *output)
{
	size_t size = output->kind == OUTPUT_PTY ? PTY_CHUNK : PIPE_CHUNK;
	ssize_t got = read(output->fd, output->process->owner->raw, size);

	if (got > 0) {
		output->process->grew = true;
		send_output(output, (size_t)got);
		return true;
	}
	if (got < 0 && errno == EINTR)
		return true;
	if (got == 0 || errno != EAGAIN) /* a terminal says EIO when its last user has gone */
		output_close(output);
	return false;
}

static bool outputs_open(const struct process *process)
{
	return process->outputs[0].fd >= 0 || process->outputs[1].fd >= 0;
}

static void on_output(evutil_socket_t fd, short what, void *arg)
{
	struct output *output = arg;
	struct process *process = output->process;
	int i;

	for (i = 0; i < READ_BURST && output->reading && output_read(output); i++)
		;
	if (process->state == PROCESS_DRAINING && !outputs_open(process) && !anyone_full(process))
		drain(process);
	else if (process->forgotten && !outputs_open(process))
		process_free(process);
}

/* ---- the end ---- */

static void subscriber_end(struct subscriber *subscriber, int status)
{
	char text[256];

	rpc_stream_send_text(subscriber->stream, text, process_end_event(status, text, sizeof text));
	rpc_stream_end(subscriber->stream);
	subscriber_detach(subscriber);
}

/* ---- records ---- */

static void process_free(struct process *process)
{
	struct subscriber *subscriber;

	process->state = PROCESS_ENDED;
	while ((subscriber = LIST_FIRST(&process->subscribers)))
		subscriber_detach(subscriber);
	output_close(&process->outputs[0]);
	output_close(&process->outputs[1]);
	process_input_end(process);
	event_del(&process->deadline);
	event_del(&process->grace);
	event_del(&process->retention);
	TAILQ_REMOVE(&process->owner->list, process, link);
	json_decref(process->config);
	free(process->tag);
	free(process);
}

/* The record is of no more use to clients. Pipes that others hold are read on: closing them would kill who writes. */
static void process_forget(struct process *process)
{
	process->owner->n_ended--;
	process->forgotten = true;
	event_del(&process->retention);
	if (!outputs_open(process))
		process_free(process);
}

static void on_retained(evutil_socket_t fd, short what, void *arg)
{
	process_forget(arg);
}

/* A burst of short commands must not cost memory. */
static void limit_retained(struct processes *processes)
{
	struct process *process, *next;

	for (process = TAILQ_FIRST(&processes->list); process && processes->n_ended > MAX_RETAINED; process = next) {
		next = TAILQ_NEXT(process, link);
		if (process->state == PROCESS_ENDED && !process->forgotten)
			process_forget(process);
	}
}

static void process_end(struct process *process)
{
	struct subscriber *subscriber;

	process->state = PROCESS_ENDED;
	while ((subscriber = LIST_FIRST(&process->subscribers)))
		subscriber_end(subscriber, process->status);
	if (process->pty) /* a terminal is of no use without its session's leader */
		output_close(&process->outputs[0]);
	json_decref(process->config);
	process->config = NULL;
	process->owner->n_ended++;
	TAILQ_REMOVE(&process->owner->list, process, link); /* ended records lie in the order of their ends */
	TAILQ_INSERT_TAIL(&process->owner->list, process, link);
	event_del(&process->grace); /* the output may have ended within it */
	after_ms(&process->retention, RETAIN_SECONDS * 1000);
	limit_retained(process->owner);
}

static void on_grace(evutil_socket_t fd, short what, void *arg)
{
	struct process *process = arg;

	if (anyone_full(process))
		return; /* drain() comes back when the reader has caught up */
	if (process->grew && ++process->graces < MAX_GRACES) {
		process->grew = false;
		after_ms(&process->grace, GRACE_MS);
	} else {
		process_end(process);
	}
}

/* The main process is gone: passes on what it left. Pipes that others still hold are given GRACE_MS of silence, or
 * none when the process was killed by us. */
static void drain(struct process *process)
{
	size_t i;
	int n;

	for (i = 0; i < 2; i++)
		for (n = 0; n < DRAIN_CHUNKS && process->outputs[i].reading; n++)
			if (!output_read(&process->outputs[i]))
				break;
	if (anyone_full(process))
		return;
	if (!outputs_open(process) || (process->killed && !process->pty)) {
		process_end(process);
	} else {
		process->grew = false;
		after_ms(&process->grace, GRACE_MS);
	}
}

static void process_exited(struct process *process, int status)
{
	process->state = PROCESS_DRAINING;
	process->status = status;
	event_del(&process->deadline);
	process_input_end(process);
	drain(process);
}

void processes_reap(struct processes *processes)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		struct process *process = process_find(processes, (uint32_t)pid, NULL, false);

		if (process)
			process_exited(process, status);
	}
}

/* ---- looking up ---- */

static bool matches(const struct process *process, uint32_t pid, const char *tag)
{
	return tag ? process->tag && strcmp(process->tag, tag) == 0 : (uint32_t)process->pid == pid;
}

struct process *process_find(struct processes *processes, uint32_t pid, const char *tag, bool ended_too)
{
	struct process *process, *ended = NULL;

	TAILQ_FOREACH_REVERSE(process, &processes->list, process_list, link) {
		if (process->forgotten || !matches(process, pid, tag))
			continue;
		if (process->state == PROCESS_RUNNING)
			return process;
		if (!ended)
			ended = process;
	}
	return ended_too ? ended : NULL;
}

static struct process *running_from(struct process *process)
{
	while (process && process->state != PROCESS_RUNNING)
		process = TAILQ_NEXT(process, link);
	return process;
}

struct process *process_first(struct processes *processes)
{
	return running_from(TAILQ_FIRST(&processes->list));
}

struct process *process_next(struct process *process)
{
	return running_from(TAILQ_NEXT(process, link));
}

/* ---- what the RPCs do ---- */

bool process_subscribe(struct process *process, struct rpc_stream *stream)
{
	struct subscriber *subscriber = calloc(1, sizeof *subscriber);
	char text[64];

	if (!subscriber)
		return false;
	subscriber->stream = stream;
	subscriber->process = process;
	evtimer_assign(&subscriber->stall, process_base(process), on_stall, subscriber);
	evtimer_assign(&subscriber->deadline, process_base(process), on_subscriber_deadline, subscriber);
	stream->state = subscriber;
	stream->on_close = on_stream_close;
	stream->on_drain = on_stream_drain;
	LIST_INSERT_HEAD(&process->subscribers, subscriber, link);
	rpc_stream_send_text(stream, text,
			     (size_t)sprintf(text, "{\"event\":{\"start\":{\"pid\":%d}}}", (int)process->pid));
	if (process->state == PROCESS_ENDED)
		subscriber_end(subscriber, process->status);
	else
		rpc_stream_keepalive(stream, "{\"event\":{\"keepalive\":{}}}");
	return true;
}

void process_subscription_ends_after(struct rpc_stream *stream, uint64_t milliseconds)
{
	struct subscriber *subscriber = stream->state;

	if (milliseconds > 0 && subscriber->process)
		after_ms(&subscriber->deadline, milliseconds);
}

static void on_deadline(evutil_socket_t fd, short what, void *arg)
{
	struct process *process = arg;
	struct subscriber *subscriber;

	process_signal(process, SIGKILL);
	LIST_FOREACH(subscriber, &process->subscribers, link)
		if (subscriber->owns_deadline)
			break;
	if (subscriber)
		subscriber_fail(subscriber, RPC_DEADLINE_EXCEEDED, "the deadline of the process has passed");
}

void process_kill_after(struct process *process, struct rpc_stream *starter, uint64_t milliseconds)
{
	struct subscriber *subscriber = starter->state;

	if (milliseconds == 0)
		return;
	subscriber->owns_deadline = true;
	after_ms(&process->deadline, milliseconds);
}

int process_signal(struct process *process, int number)
{
	if (process->state != PROCESS_RUNNING) /* the pid may be another's by now */
		return ESRCH;
	process->killed |= number == SIGKILL || number == SIGTERM;
	return kill(process->pid, number) < 0 ? errno : 0;
}

int process_resize(struct process *process, uint16_t cols, uint16_t rows)
{
	struct winsize size = {.ws_col = cols, .ws_row = rows};

	return ioctl(process->outputs[0].fd, TIOCSWINSZ, &size) < 0 ? errno : 0;
}

static void output_init(struct process *process, struct output *output, enum output_kind kind, int fd)
{
	output->process = process;
	output->kind = kind;
	output->fd = fd;
	if (fd < 0)
		return;
	event_assign(&output->event, process_base(process), fd, EV_READ | EV_PERSIST, on_output, output);
	event_add(&output->event, NULL);
	output->reading = true;
}

struct process *process_add(struct processes *processes, const struct spawn_result *spawned, bool pty, json_t *config,
			    const char *tag)
{
	struct process *process = calloc(1, sizeof *process);

	if (!process || (tag && !(process->tag = strdup(tag)))) {
		free(process);
		kill(spawned->pid, SIGKILL); /* reaped as a process that nobody knows */
		close(spawned->out);
		if (spawned->in >= 0)
			close(spawned->in);
		if (spawned->err >= 0)
			close(spawned->err);
		return NULL;
	}
	process->owner = processes;
	process->pid = spawned->pid;
	process->pty = pty;
	process->config = json_incref(config);
	LIST_INIT(&process->subscribers);
	evtimer_assign(&process->deadline, processes->envd->base, on_deadline, process);
	evtimer_assign(&process->grace, processes->envd->base, on_grace, process);
	evtimer_assign(&process->retention, processes->envd->base, on_retained, process);
	output_init(process, &process->outputs[0], pty ? OUTPUT_PTY : OUTPUT_STDOUT, spawned->out);
	output_init(process, &process->outputs[1], OUTPUT_STDERR, spawned->err);
	process_input_init(process, pty ? spawned->out : spawned->in);
	TAILQ_INSERT_TAIL(&processes->list, process, link);
	return process;
}

/* ---- all of them ---- */

static void read_oom_score(struct processes *processes)
{
	FILE *file = fopen("/proc/self/oom_score_adj", "re");
	int own = 0;

	if (file && fscanf(file, "%d", &own) != 1)
		own = 0;
	if (file)
		fclose(file);
	snprintf(processes->oom_score, sizeof processes->oom_score, "%d", own + 100 > 1000 ? 1000 : own + 100);
}

struct processes *processes_new(struct envd *envd)
{
	struct processes *processes = calloc(1, sizeof *processes);

	if (!processes)
		return NULL;
	processes->envd = envd;
	TAILQ_INIT(&processes->list);
	read_oom_score(processes);
	return processes;
}

/* Processes are not killed: they are the user's, and the agent may be started anew. */
void processes_free(struct processes *processes)
{
	struct process *process;

	while ((process = TAILQ_FIRST(&processes->list)))
		process_free(process);
	free(processes);
}

const char *processes_oom_score(const struct processes *processes)
{
	return processes->oom_score;
}
