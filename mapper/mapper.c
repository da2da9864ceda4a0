/* Loaded into QEMU by LD_PRELOAD: maps files over guest RAM on request.
 *
 * QEMU can map one file as RAM when it starts, and nothing later. With this thread in it a process that was started
 * ahead, with empty RAM, becomes a machine of any snapshot: its RAM is a few mappings of files that others map too.
 * The files come as descriptors that were opened for reading only, which QEMU's own option does not allow before 8.2.
 *
 * AENV_MAPPER names two inherited descriptors, "SOCKET:LIBRARY": a listening Unix socket, and this file, which the
 * loader has opened anew by /proc/self/fd/LIBRARY because QEMU's user may not reach its path.
 *
 * While vCPUs are stopped nobody else changes these mappings; that the machine is stopped is up to the client.
 */
#define _GNU_SOURCE
#include "request.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define STACK_BYTES (128 * 1024)
/* A client sends a request at once and reads its answer; one that does not is stuck and must not block the next. */
#define CLIENT_SECONDS 10
/* Milliseconds before accept is tried again when the process is out of descriptors or memory. */
#define ACCEPT_PAUSE 100

struct server {
  int listener;
  uid_t owner; /* of the socket: only it may connect */
  struct mapper mapper;
};

static void close_all(const int *fds, size_t count) {
  for (size_t i = 0; i < count; i++) close(fds[i]);
}

/* Descriptors that came with a message. -1: some did not fit and were dropped by the kernel. */
static int received(struct msghdr *message, int *fds, size_t *count) {
  *count = 0;
  for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds + *count, CMSG_DATA(c), n * sizeof(int));
    *count += n;
  }
  return message->msg_flags & MSG_CTRUNC ? -1 : 0;
}

/* One request and its answer; 0 at the end of the connection. */
static int serve_request(struct server *s, int client) {
  /* One byte more than a request has, so that a longer message shows. */
  char bytes[sizeof(struct mapper_request) + 1];
  union {
    struct cmsghdr align;
    char space[CMSG_SPACE(MAPPER_FDS * sizeof(int))];
  } control;
  struct iovec part = {bytes, sizeof bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                           .msg_controllen = sizeof control};
  int fds[MAPPER_FDS];
  size_t count;
  ssize_t n = recvmsg(client, &message, MSG_CMSG_CLOEXEC);
  if (n < 0 && errno == EINTR) return 1;
  if (n < 0) return 0;
  int whole = received(&message, fds, &count);
  if (n == 0 && count == 0) return 0;
  struct mapper_answer answer = {.magic = MAPPER_MAGIC, .version = MAPPER_VERSION, .step = STEP_FILES, .error = EMFILE};
  if (whole < 0)
    close_all(fds, count);
  else
    answer = mapper_handle(&s->mapper, bytes, (size_t)n, fds, count);
  return send(client, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer;
}

static int may_connect(const struct server *s, int client) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  return getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == s->owner;
}

static void serve_client(struct server *s, int client) {
  struct timeval limit = {.tv_sec = CLIENT_SECONDS};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (may_connect(s, client))
    while (serve_request(s, client)) {
    }
  mapper_forget(&s->mapper);
  close(client);
}

static void *serve(void *argument) {
  struct server *s = argument;
  pthread_setname_np(pthread_self(), "aenv-mapper");
  for (;;) {
    int client = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
    if (client >= 0)
      serve_client(s, client);
    else if (errno != EINTR && errno != ECONNABORTED)
      poll(NULL, 0, ACCEPT_PAUSE);
  }
  return NULL;
}

/* All signals are QEMU's: none may be taken by this thread. */
static int start_thread(struct server *s) {
  sigset_t all, before;
  pthread_attr_t attributes;
  pthread_t thread;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&thread, &attributes, serve, s);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return error;
}

static void __attribute__((noreturn)) give_up(const char *what, int error) {
  fprintf(stderr, "aenv-mapper: %s: %s\n", what, strerror(error));
  _exit(1);
}

__attribute__((constructor)) static void load(void) {
  static struct server server;
  const char *text = getenv("AENV_MAPPER");
  int library;
  if (!text) return;
  if (sscanf(text, "%d:%d", &server.listener, &library) != 2) give_up("AENV_MAPPER is not SOCKET:LIBRARY", EINVAL);
  /* Nothing that this process might start shall have them. */
  unsetenv("AENV_MAPPER");
  unsetenv("LD_PRELOAD");
  close(library);
  /* QEMU asks for huge pages where it needs some kilobytes (ACPI tables, translated code): 4 MiB a process. */
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  fcntl(server.listener, F_SETFD, FD_CLOEXEC);
  struct ucred owner;
  socklen_t length = sizeof owner;
  /* Of a listening socket these are the credentials of who has called listen(). */
  if (getsockopt(server.listener, SOL_SOCKET, SO_PEERCRED, &owner, &length) < 0) give_up("the socket", errno);
  server.owner = owner.uid;
  server.mapper.page = (uint64_t)sysconf(_SC_PAGESIZE);
  int error = start_thread(&server);
  if (error) give_up("cannot start a thread", error);
}
