#define _GNU_SOURCE
#include "c_device_workers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

#define IDLE_SECONDS 1
#define STACK (256u << 10) /* bytes; what is not touched takes no memory */

struct workers {
    pthread_mutex_t lock;
    pthread_cond_t wanted;
    struct job *first, **last;
    unsigned threads, idle, most, waiting;
    int ending;
    pthread_t thread[];
};

struct beginning {
    void *(*body)(void *);
    void *argument;
};

static void *begin(void *opaque)
{
    struct beginning beginning = *(struct beginning *)opaque;
    free(opaque);
    /* Memory for our writes must not wait for writes to a file system on one of our own devices. */
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    return beginning.body(beginning.argument);
}

int thread_start(void *(*body)(void *), void *argument, unsigned long *thread)
{
    struct beginning *beginning = malloc(sizeof *beginning);
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_t made;
    if (!beginning)
        return -ENOMEM;
    *beginning = (struct beginning){body, argument};
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    sigfillset(&all); /* signals are for the thread that runs Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&made, &attributes, begin, beginning);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc)
        free(beginning);
    else
        *thread = made;
    return -rc;
}

char *thread_buffer_map(void)
{
    void *mapped = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return mapped == MAP_FAILED ? NULL : mapped;
}

/* The next job; NULL at the end. A worker that finds none for a while gives its buffer's memory back. */
static struct job *take(struct workers *workers, char *buffer)
{
    struct timespec until;
    bool used = true;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += IDLE_SECONDS;
    pthread_mutex_lock(&workers->lock);
    workers->idle++;
    while (!workers->first && !workers->ending) {
        if (!used)
            pthread_cond_wait(&workers->wanted, &workers->lock);
        else if (pthread_cond_timedwait(&workers->wanted, &workers->lock, &until))
            used = madvise(buffer, LARGEST, MADV_DONTNEED);
    }
    workers->idle--;
    struct job *job = workers->first;
    if (job && !(workers->first = job->next))
        workers->last = &workers->first;
    workers->waiting -= job != NULL;
    pthread_mutex_unlock(&workers->lock);
    return job;
}

static void *work(void *opaque)
{
    char *buffer = thread_buffer_map();
    struct job *job;
    while (buffer && (job = take(opaque, buffer)))
        job->run(job, buffer);
    if (buffer)
        munmap(buffer, LARGEST);
    return NULL;
}

int workers_start(unsigned most, struct workers **out)
{
    struct workers *workers = calloc(1, sizeof *workers + most * sizeof *workers->thread);
    if (!workers)
        return -ENOMEM;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->wanted, NULL);
    workers->last = &workers->first;
    workers->most = most;
    int rc = thread_start(work, workers, &workers->thread[0]);
    if (rc) {
        free(workers);
        return rc;
    }
    workers->threads = 1; /* so that no job is ever left without a thread */
    *out = workers;
    return 0;
}

void workers_give(struct workers *workers, struct job *job)
{
    pthread_mutex_lock(&workers->lock);
    job->next = NULL;
    *workers->last = job;
    workers->last = &job->next;
    if (++workers->waiting > workers->idle && workers->threads < workers->most &&
        thread_start(work, workers, &workers->thread[workers->threads]) == 0)
        workers->threads++;
    pthread_cond_signal(&workers->wanted);
    pthread_mutex_unlock(&workers->lock);
}

void workers_end(struct workers *workers)
{
    pthread_mutex_lock(&workers->lock);
    workers->ending = 1;
    pthread_cond_broadcast(&workers->wanted);
    pthread_mutex_unlock(&workers->lock);
    for (unsigned i = 0; i < workers->threads; i++)
        pthread_join(workers->thread[i], NULL);
    pthread_cond_destroy(&workers->wanted);
    pthread_mutex_destroy(&workers->lock);
    free(workers);
}
