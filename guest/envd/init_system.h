/* What /init does to the system. What cannot be done is said in the log: the host still gets a guest that works. */
#ifndef ENVD_INIT_SYSTEM_H
#define ENVD_INIT_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

enum { SYSTEM_MAX_ENTROPY = 512 }; /* bytes */

/* Sets the clock to `wanted` (nanoseconds since 1970) unless it is near enough: 50 ms behind to 5 s ahead. */
void system_set_clock(int64_t wanted);
/* Mixes bytes that no other clone of the snapshot gets into the kernel's random pool and makes it use them at once. */
void system_add_entropy(const uint8_t *data, size_t len);
void system_set_hostname(const char *name);

/* Files: these wait for the disk. */

/* A line of /etc/hosts, so that the host name resolves (sudo looks it up at every call). */
void system_write_hosts(const char *name);
void system_write_machine_id(const char *id);
/* /run/e2b/.E2B_SANDBOX, by which programs know where they are. */
void system_mark_sandbox(void);

#endif
