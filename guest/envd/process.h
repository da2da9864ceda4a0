/* Processes started through the agent: their output, input and end. The RPC face is process_rpc.c.
 *
 * Life: RUNNING until the main process is reaped; DRAINING while output that it may have left in pipes is passed on;
 * then ENDED: subscribers have got the end event, the record stays RETAIN_SECONDS for a late Connect.
 * Output is read always. Without subscribers it is thrown away, so nothing ever blocks a process that nobody watches.
 */
#ifndef ENVD_PROCESS_H
#define ENVD_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>
#include <event2/buffer.h>
#include <event2/event_struct.h>
#include <jansson.h>

#include "envd.h"
#include "rpc.h"
#include "spawn.h"

enum process_state { PROCESS_RUNNING, PROCESS_DRAINING, PROCESS_ENDED };
enum output_kind { OUTPUT_STDOUT, OUTPUT_STDERR, OUTPUT_PTY };

struct process;

struct output {
	struct process *process;
	enum output_kind kind;
	int fd;                    /* -1: at its end, or none */
	bool reading;
	struct event event;
};

/* One stream that gets a process's events. */
struct subscriber {
	LIST_ENTRY(subscriber) link;
	struct process *process;   /* NULL once the process has let go of it */
	struct rpc_stream *stream;
	bool owns_deadline;        /* Start's stream: it fails with the process's deadline */
	bool full;                 /* the client is behind; output waits for it */
	size_t pending;            /* queued bytes when the stall timer was set */
	struct event stall, deadline;
};

/* Someone who waits until the input that he gave is written. */
struct input_waiter {
	LIST_ENTRY(input_waiter) link;
	void (*done)(struct input_waiter *waiter, int error); /* 0, or EPIPE: the process takes no input any more */
	void *data;
};

struct process {
	TAILQ_ENTRY(process) link;
	struct processes *owner;
	enum process_state state;
	pid_t pid;
	char *tag;                 /* NULL: none */
	json_t *config;            /* for List; NULL once ENDED */
	bool pty;
	bool killed;               /* by our signal: pipes that others hold are not waited for */
	bool forgotten;            /* no longer found; lives on only to read what others write into its pipes */
	int status;                /* of waitpid(), from DRAINING on */
	struct output outputs[2];
	int in;                    /* -1: closed or not given; a terminal has the master here too */
	bool input_closing;        /* close when the queue is written */
	struct evbuffer *input;    /* NULL while nothing waits */
	struct event input_event;
	LIST_HEAD(, input_waiter) waiters;
	LIST_HEAD(, subscriber) subscribers;
	struct event deadline;
	struct event grace;        /* DRAINING */
	struct event retention;    /* ENDED */
	unsigned graces;
	bool grew;                 /* output was read since the last grace */
};

struct processes *processes_new(struct envd *envd);
void processes_free(struct processes *processes);
/* Called when SIGCHLD was received. */
void processes_reap(struct processes *processes);

/* Takes over the spawned process; `config` and `tag` are borrowed. NULL without memory (then it has been killed). */
struct process *process_add(struct processes *processes, const struct spawn_result *spawned, bool pty, json_t *config,
			    const char *tag);
/* By pid (tag NULL) or tag. Ended ones only when `ended_too`. */
struct process *process_find(struct processes *processes, uint32_t pid, const char *tag, bool ended_too);
struct process *process_first(struct processes *processes);
struct process *process_next(struct process *process);

/* Kills it at the deadline; the streams get the end event, that of Start the code deadline_exceeded instead. */
void process_kill_after(struct process *process, struct rpc_stream *starter, uint64_t milliseconds);
/* Sends the start event, and the end event too when the process has ended. False without memory. */
bool process_subscribe(struct process *process, struct rpc_stream *stream);
/* The stream's own deadline (Connect): it ends, the process goes on. */
void process_subscription_ends_after(struct rpc_stream *stream, uint64_t milliseconds);
int process_signal(struct process *process, int number);
int process_resize(struct process *process, uint16_t cols, uint16_t rows);
/* 0: taken (written, or queued: see process_input_pending), ENOBUFS: too much waits already, EPIPE: closed. */
int process_write(struct process *process, const void *data, size_t len);
size_t process_input_pending(const struct process *process);
/* Calls back once the queue is empty or input has ended. */
void process_wait_input(struct process *process, struct input_waiter *waiter);
void process_close_input(struct process *process);

/* "exit status 3", "signal: killed (core dumped)": as in the events, into `out`. */
void process_status_text(int status, char *out, size_t size);
/* The end event as JSON; returns its length. */
size_t process_end_event(int status, char *out, size_t size);
/* process_input.c, for process.c: fails those who wait and frees the queue. */
void process_input_end(struct process *process);
void process_input_init(struct process *process, int fd);
struct event_base *process_base(struct process *process);
/* oom_score_adj of new processes: the kernel should kill them before the agent. */
const char *processes_oom_score(const struct processes *processes);

#endif
