/* The files that say who the guest is: /etc/hosts, /etc/machine-id, the mark of a sandbox. */
#ifndef ENVD_IDENTITY_H
#define ENVD_IDENTITY_H

#include "envd.h"

struct identity *identity_new(struct envd *envd); /* NULL: out of memory */
void identity_free(struct identity *identity);

/* Have the files say this soon; NULL leaves what they say. */
void identity_set(struct identity *identity, const char *hostname, const char *machine_id);
/* Write what is waiting, now: somebody is about to look. */
void identity_write(struct identity *identity);

#endif
