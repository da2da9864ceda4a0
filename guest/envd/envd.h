/* The one context of the guest agent, handed to every module. There are no other globals. */
#ifndef ENVD_ENVD_H
#define ENVD_ENVD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <event2/event.h>
#include <jansson.h>

/* The version that SDKs read to decide what the agent can do. A plain semver without suffix. */
#define ENVD_VERSION "0.6.13"
#define ENVD_MAX_HOST_ADDRESSES 8

struct http_server;
struct route;
struct processes;
struct metrics;
struct watchers;

struct envd {
	struct event_base *base;
	struct http_server *http;
	struct processes *processes;  /* process.c */
	struct watchers *watchers;    /* watch.c; NULL until fs_register() */
	struct metrics *metrics;      /* metrics.c */
	struct identity *identity;    /* identity.c */

	char *token;            /* access token; NULL: none asked for */
	char *default_user;     /* never NULL; whom the agent runs as until /init says otherwise */
	char *default_workdir;  /* absolute path, or NULL: the user's home */
	json_t *env_vars;       /* object of strings: what /init gave last */
	char *sandbox_id;       /* NULL until /init */
	char *template_id;      /* NULL until /init */
	int64_t init_ns;        /* timestamp of the newest /init that was applied, 0: none */

	struct rlimit file_limit; /* RLIMIT_NOFILE as it was given to us; processes get it back */
	bool no_system;         /* leave clock, host name, machine id and random pool alone */
	char *host_addresses[ENVD_MAX_HOST_ADDRESSES]; /* peers that may call /init, /dial and /sync */
	size_t n_host_addresses;
};

/* Each module registers its routes. */
void health_register(struct envd *envd);
void init_register(struct envd *envd);
void metrics_register(struct envd *envd);
void dial_register(struct envd *envd);
void sync_register(struct envd *envd);
void process_register(struct envd *envd);
void files_register(struct envd *envd); /* files_*.c: GET/POST /files, POST /files/compose */
void fs_register(struct envd *envd);    /* fs_rpc.c: filesystem.Filesystem */
void fs_unregister(struct envd *envd);  /* after http_server_free(): the last watchers */

#endif
