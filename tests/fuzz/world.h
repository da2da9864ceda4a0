/* The agent with all its handlers, in a world without effects: clients are socket pairs, paths lie in a scratch folder,
 * processes are pairs of pipes that the input plays, ports of the guest are socket pairs, the system is left alone.
 *
 * The linker puts world.c's functions in place of path_resolve, user_lookup, spawn_process, kill, waitpid, socket,
 * connect, event_assign and event_add (see WRAPPED in targets.py).
 */
#ifndef TESTS_FUZZ_WORLD_H
#define TESTS_FUZZ_WORLD_H

#include <stdbool.h>
#include <stddef.h>

enum {
	WORLD_CLIENTS = 4,
	WORLD_STRANGER = 3, /* this client's address is none of the host's */
};

struct world;

struct world *world_new(void);
/* All clients leave; every connection, process and descriptor must be gone afterwards. */
void world_free(struct world *world);

/* Sends to the agent and lets it work; a client that is not there is connected first. */
void world_send(struct world *world, unsigned client, const char *data, size_t size);
void world_half_close(struct world *world, unsigned client);
void world_close(struct world *world, unsigned client);
/* A client that does not read makes the agent's output wait. */
void world_set_reading(struct world *world, unsigned client, bool reading);

/* All time-outs that are set from now on are over at once. */
void world_hurry(struct world *world);

/* The newest process (one whose command starts with '.' has its input full, one with '!' cannot be started): writes, ends (by `status` as of waitpid), lets go of its pipes, or reads its input. */
void world_process_write(struct world *world, bool error_too, size_t size);
void world_process_end(struct world *world, int status);
void world_process_close(struct world *world);
void world_process_read(struct world *world);
/* The newest port that was dialled: answers and closes. */
void world_port_write(struct world *world, const char *data, size_t size);
void world_port_close(struct world *world);

#endif
