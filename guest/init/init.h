/* PID 1 of the micro-VM: from a bare kernel to a supervised envd on the root disk. */
#ifndef AENV_INIT_H
#define AENV_INIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { VALUE_MAX = 256 };

/* What the kernel command line says. An empty string means "not given". */
struct options {
    char ip4[VALUE_MAX];      /* aenv.ip4=ADDRESS/PREFIX */
    char gw4[VALUE_MAX];      /* aenv.gw4=ADDRESS */
    char ip6[VALUE_MAX];      /* aenv.ip6=ADDRESS/PREFIX */
    char gw6[VALUE_MAX];      /* aenv.gw6=ADDRESS */
    char gwmac[VALUE_MAX];    /* aenv.gwmac=MAC of both gateways */
    char dns[VALUE_MAX];      /* aenv.dns=ADDRESS[,ADDRESS...] */
    char hostname[VALUE_MAX]; /* aenv.hostname=NAME */
    char rootflags[VALUE_MAX]; /* aenv.rootflags=ext4 mount options */
    char init[VALUE_MAX];     /* aenv.init=PATH of the image's own init */
};

/* log.c */
void log_open(void);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Like log_line, with ": REASON" of errno at the end. */
void log_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Say why and power the machine off: without a root disk or an agent it is of no use to anybody. */
void fatal(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void fatal_errno(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void power_off(void) __attribute__((noreturn));

/* options.c */
void options_parse(struct options *options, const char *cmdline);
void options_read(struct options *options);

/* files.c */
/* Read at most size-1 bytes and end them with NUL. Returns the length, or -1 with errno. */
ssize_t file_read(const char *path, char *buffer, size_t size);
/* Replace (or with `append` extend) a file. Returns 0, or -1 with errno. */
int file_write(const char *path, const char *text, mode_t mode, bool append);
bool has_word(const char *text, const char *word);

/* modules.c */
void modules_load(const char *list);

/* mounts.c */
void mounts_early(void);
void mounts_switch_root(const char *device, const char *options);
void mounts_inside_root(void);

/* network.c */
void network_up(const struct options *options);

/* identity.c */
void identity_apply(const struct options *options);

/* supervise.c */
void supervise(int envd, const struct options *options) __attribute__((noreturn));

#endif
