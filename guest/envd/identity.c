/* The host waits for the answer to /init before it lets anyone in, and under software emulation the write path of a file
 * system costs tens of milliseconds after a restore: for many clones that start at once, the processor time of others.
 * So the files are written when somebody asks the agent for anything, or after a moment in which nobody has. */
#include <stdlib.h>
#include <string.h>

#include <event2/event.h>

#include "identity.h"
#include "init_system.h"

enum { DELAY_S = 1 };

struct identity {
	struct event *timer;
	char *hostname, *machine_id;
	bool waiting;
};

static void on_timer(evutil_socket_t fd, short what, void *identity)
{
	(void)fd;
	(void)what;
	identity_write(identity);
}

struct identity *identity_new(struct envd *envd)
{
	struct identity *identity = calloc(1, sizeof(*identity));

	if (identity && !(identity->timer = evtimer_new(envd->base, on_timer, identity))) {
		free(identity);
		return NULL;
	}
	return identity;
}

void identity_free(struct identity *identity)
{
	event_free(identity->timer);
	free(identity->hostname);
	free(identity->machine_id);
	free(identity);
}

static void replace(char **where, const char *text)
{
	if (!text)
		return;
	free(*where);
	*where = strdup(text);
}

void identity_set(struct identity *identity, const char *hostname, const char *machine_id)
{
	const struct timeval delay = {DELAY_S, 0};

	replace(&identity->hostname, hostname);
	replace(&identity->machine_id, machine_id);
	identity->waiting = true;
	event_add(identity->timer, &delay);
}

void identity_write(struct identity *identity)
{
	if (!identity->waiting)
		return;
	identity->waiting = false;
	event_del(identity->timer);
	if (identity->hostname)
		system_write_hosts(identity->hostname);
	if (identity->machine_id)
		system_write_machine_id(identity->machine_id);
	system_mark_sandbox();
}
