/* Threads that do what a queue must not wait for. */
#ifndef AENV_DEVICE_WORKERS_H
#define AENV_DEVICE_WORKERS_H

#define LARGEST (1u << 20) /* bytes of one request */

struct workers;

struct job {
    struct job *next;
    void (*run)(struct job *job, char *buffer); /* the worker's own, LARGEST bytes, page-aligned */
};

int workers_start(unsigned most, struct workers **out);
void workers_give(struct workers *workers, struct job *job);
void workers_end(struct workers *workers); /* after all jobs are done */

/* A thread that gets no signals, has a small stack, and whose allocations never wait for our own devices. */
int thread_start(void *(*body)(void *), void *argument, unsigned long *thread);

/* LARGEST bytes that take no memory until they are used; for munmap. NULL: no address space. */
char *thread_buffer_map(void);

#endif
