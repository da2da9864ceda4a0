/* Input of processes: written at once as far as it goes, the rest waits in a queue for the process to read. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "process.h"

enum { MAX_INPUT = 16 << 20 }; /* bytes that may wait for a process that does not read */

static void call_waiters(struct process *process, int error)
{
	struct input_waiter *waiter;

	while ((waiter = LIST_FIRST(&process->waiters))) {
		LIST_REMOVE(waiter, link);
		waiter->done(waiter, error);
	}
}

static void free_queue(struct process *process)
{
	if (!process->input)
		return;
	event_del(&process->input_event);
	evbuffer_free(process->input);
	process->input = NULL;
}

void process_input_end(struct process *process)
{
	free_queue(process);
	if (process->in >= 0 && !process->pty)
		close(process->in);
	process->in = -1;
	call_waiters(process, EPIPE);
}

static void on_writable(evutil_socket_t fd, short what, void *arg)
{
	struct process *process = arg;

	while (evbuffer_get_length(process->input) > 0) {
		if (evbuffer_write(process->input, process->in) >= 0)
			continue;
		if (errno == EAGAIN || errno == EINTR)
			return;
		process_input_end(process); /* it has closed its end */
		return;
	}
	free_queue(process);
	if (process->input_closing)
		process_input_end(process);
	call_waiters(process, 0);
}

void process_input_init(struct process *process, int fd)
{
	process->in = fd;
	LIST_INIT(&process->waiters);
	event_assign(&process->input_event, process_base(process), fd, EV_WRITE | EV_PERSIST, on_writable, process);
}

static int enqueue(struct process *process, const uint8_t *data, size_t len)
{
	if (!process->input) {
		process->input = evbuffer_new();
		if (!process->input)
			return ENOBUFS;
		event_add(&process->input_event, NULL);
	}
	return evbuffer_add(process->input, data, len) < 0 ? ENOBUFS : 0;
}

int process_write(struct process *process, const void *data, size_t len)
{
	size_t done = 0;

	if (process->in < 0 || process->input_closing)
		return EPIPE;
	if (process_input_pending(process) + len > MAX_INPUT)
		return ENOBUFS;
	while (!process->input && done < len) {
		ssize_t wrote = write(process->in, (const char *)data + done, len - done);

		if (wrote >= 0) {
			done += (size_t)wrote;
		} else if (errno == EAGAIN) {
			break;
		} else if (errno != EINTR) {
			process_input_end(process);
			return EPIPE;
		}
	}
	return done < len ? enqueue(process, (const uint8_t *)data + done, len - done) : 0;
}

size_t process_input_pending(const struct process *process)
{
	return process->input ? evbuffer_get_length(process->input) : 0;
}

void process_wait_input(struct process *process, struct input_waiter *waiter)
{
	LIST_INSERT_HEAD(&process->waiters, waiter, link);
}

void process_close_input(struct process *process)
{
	if (process->input && !process->pty)
		process->input_closing = true; /* what was sent before still arrives */
	else
		process_input_end(process);
}
