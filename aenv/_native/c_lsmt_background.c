/* A commit that nobody waits for, in a thread of its own with the lowest priorities. It never takes Python's lock: a
 * holder of that lock must not wait for an idle processor. And it ends with its work, because going back to an ordinary
 * priority may not be allowed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lsmt.h"

#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_IDLE (3 << 13)

struct job {
    struct stack *stack, *parent;
    const struct commit_job *todo;
    int rc;
};

static int go_on(void *opaque, uint64_t done)
{
    (void)done;
    return !atomic_load((atomic_bool *)opaque);
}

static void *run(void *opaque)
{
    struct job *job = opaque;
    const struct commit_job *todo = job->todo;
    const struct sched_param parameter = {0};
    /* Where one is refused the commit goes on with ordinary priority. */
    (void)sched_setscheduler(0, SCHED_IDLE, &parameter);
    (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE);
    job->rc = stack_commit(job->stack, job->parent, todo->keep_zeros, todo->fd, todo->options, todo->max_entries, go_on,
                           todo->stop, todo->result, todo->fault);
    return NULL;
}

int stack_commit_in_background(struct stack *stack, struct stack *parent, const struct commit_job *todo)
{
    struct job job = {.stack = stack, .parent = parent, .todo = todo};
    pthread_t thread;
    int rc = pthread_create(&thread, NULL, run, &job);
    if (rc)
        return fault_set(todo->fault, rc, "thread", "cannot be started: %s", strerror(rc));
    pthread_join(thread, NULL);
    return job.rc;
}
