/* Threads that do what a queue must not wait for. */
#ifndef AENV_DEVICE_WORKERS_H
#define AENV_DEVICE_WORKERS_H

struct workers;

struct job {
    struct job *next;
    void (*run)(struct job *job);
};

int workers_start(unsigned most, struct workers **out);
void workers_give(struct workers *workers, struct job *job);
void workers_end(struct workers *workers); /* after all jobs are done */

/* A thread that gets no signals, has a small stack, and whose allocations never wait for our own devices. */
int thread_start(void *(*body)(void *), void *argument, unsigned long *thread);

#endif
