/* envd: the agent inside a sandbox. HTTP/1.1 and the Connect protocol on one port, one event loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <event2/event.h>

#include "envd.h"
#include "http.h"
#include "identity.h"
#include "process.h"
#include "users.h"

enum { DEFAULT_PORT = 49983, WANTED_FILES = 65536 };

struct options {
	uint16_t port;
	const char *bind;          /* NULL: every address */
};

static void usage(FILE *out)
{
	fprintf(out, "usage: envd [--listen-port PORT] [--bind ADDRESS] [--host-address ADDRESS]... [--default-user NAME]\n"
		     "            [--no-system] [--version]\n"
		     "\n"
		     "  --listen-port PORT      port to serve (49983; 0: any, printed on standard output)\n"
		     "  --bind ADDRESS          address to serve (all)\n"
		     "  --host-address ADDRESS  peers that may call /init and /dial (169.254.0.22, fd00:ae::22)\n"
		     "  --default-user NAME     user of processes and files until /init names one (our own)\n"
		     "  --no-system             never set clock, host name, machine id and random pool\n");
}

static void fail(const char *what)
{
	fprintf(stderr, "envd: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void bad_usage(const char *what)
{
	fprintf(stderr, "envd: %s\n", what);
	usage(stderr);
	exit(2);
}

static uint16_t parse_port(const char *text)
{
	char *end;
	unsigned long port = strtoul(text, &end, 10);

	if (*text < '0' || *text > '9' || *end || port > UINT16_MAX)
		bad_usage("--listen-port: must be a number up to 65535");
	return (uint16_t)port;
}

static void add_host(struct envd *envd, const char *address)
{
	if (envd->n_host_addresses == ENVD_MAX_HOST_ADDRESSES)
		bad_usage("--host-address: too many");
	envd->host_addresses[envd->n_host_addresses++] = strdup(address);
}

static void parse_options(int argc, char **argv, struct envd *envd, struct options *options)
{
	enum { PORT = 256, BIND, HOST, USER, NO_SYSTEM, VERSION, HELP };
	static const struct option known[] = {
		{"listen-port", required_argument, NULL, PORT}, {"bind", required_argument, NULL, BIND},
		{"host-address", required_argument, NULL, HOST}, {"default-user", required_argument, NULL, USER},
		{"no-system", no_argument, NULL, NO_SYSTEM}, {"version", no_argument, NULL, VERSION},
		{"help", no_argument, NULL, HELP}, {NULL, 0, NULL, 0},
	};
	char self[256];
	const char *user = self;
	int option;

	if (geteuid() == 0)
		strcpy(self, "root"); /* an image may have no /etc/passwd */
	else
		user_name(geteuid(), self, sizeof self);
	while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (option) {
		case PORT:
			options->port = parse_port(optarg);
			break;
		case BIND:
			options->bind = optarg;
			break;
		case HOST:
			add_host(envd, optarg);
			break;
		case USER:
			user = optarg;
			break;
		case NO_SYSTEM:
			envd->no_system = true;
			break;
		case VERSION:
			puts(ENVD_VERSION);
			exit(0);
		case HELP:
			usage(stdout);
			exit(0);
		default:
			usage(stderr);
			exit(2);
		}
	}
	if (optind < argc)
		bad_usage("no arguments are taken besides options");
	if (envd->n_host_addresses == 0) {
		add_host(envd, "169.254.0.22");
		add_host(envd, "fd00:ae::22");
	}
	envd->default_user = strdup(user);
}

/* Descriptors 0 to 2 must exist, or pipes for a child could land there and be overwritten on their way. */
static void open_standard_files(void)
{
	int fd;

	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd <= 2);
	if (fd > 2)
		close(fd);
}

static void raise_file_limit(struct envd *envd)
{
	struct rlimit wanted;

	if (getrlimit(RLIMIT_NOFILE, &envd->file_limit) < 0)
		fail("getrlimit");
	wanted = envd->file_limit;
	if (wanted.rlim_cur < WANTED_FILES)
		wanted.rlim_cur = wanted.rlim_max < WANTED_FILES ? wanted.rlim_max : WANTED_FILES;
	if (setrlimit(RLIMIT_NOFILE, &wanted) < 0)
		fail("setrlimit");
}

/* Small and steady: one arena, large blocks straight from and to the kernel, the rest given back early. */
static void tune_allocator(void)
{
	mallopt(M_ARENA_MAX, 1);
	mallopt(M_MMAP_THRESHOLD, 128 * 1024);
	mallopt(M_TRIM_THRESHOLD, 128 * 1024);
	mallopt(M_TOP_PAD, 16 * 1024);
}

static void on_signal(evutil_socket_t fd, short what, void *arg)
{
	struct envd *envd = arg;
	struct signalfd_siginfo info;

	while (read(fd, &info, sizeof info) == sizeof info) {
		if (info.ssi_signo == SIGCHLD)
			processes_reap(envd->processes);
		else
			event_base_loopbreak(envd->base);
	}
}

static struct event *watch_signals(struct envd *envd, int *fd)
{
	const unsigned long normal[4] = {0};
	struct event *event;
	sigset_t set;

	/*
	 * Ignored signals pass execve, and whoever started us may have left some: glibc's posix_spawn leaves its
	 * internal signals 32 and 33 ignored. Its sigaction refuses those, hence the raw call; zeros are SIG_DFL.
	 */
	for (int number = 1; number < NSIG; number++)
		if (number != SIGKILL && number != SIGSTOP)
			syscall(SYS_rt_sigaction, number, normal, NULL, 8);
	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	*fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
	if (*fd < 0)
		fail("signalfd");
	event = event_new(envd->base, *fd, EV_READ | EV_PERSIST, on_signal, envd);
	if (!event || event_add(event, NULL) < 0)
		fail("event_add");
	return event;
}

static struct event_base *new_base(void)
{
	struct event_config *config = event_config_new();
	struct event_base *base;

	if (!config)
		fail("event_config_new");
	event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK | EVENT_BASE_FLAG_IGNORE_ENV);
	base = event_base_new_with_config(config);
	event_config_free(config);
	if (!base)
		fail("event_base_new_with_config");
	return base;
}

static int serve_on(struct envd *envd, const struct options *options)
{
	int port;

	if (options->bind) {
		port = http_server_listen(envd->http, options->bind, options->port);
		if (port < 0)
			fail(options->bind);
		return port;
	}
	port = http_server_listen(envd->http, "::", options->port); /* takes IPv4 too */
	if (port < 0 && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL))
		port = http_server_listen(envd->http, "0.0.0.0", options->port);
	if (port < 0)
		fail("listening");
	return port;
}

static void register_all(struct envd *envd)
{
	health_register(envd);
	init_register(envd);
	metrics_register(envd);
	dial_register(envd);
	sync_register(envd);
	process_register(envd);
	files_register(envd);
	fs_register(envd);
}

static void clear(struct envd *envd)
{
	size_t i;

	free(envd->metrics);
	free(envd->token);
	free(envd->default_user);
	free(envd->default_workdir);
	free(envd->sandbox_id);
	free(envd->template_id);
	json_decref(envd->env_vars);
	for (i = 0; i < envd->n_host_addresses; i++)
		free(envd->host_addresses[i]);
}

int main(int argc, char **argv)
{
	struct envd envd = {0};
	struct options options = {.port = DEFAULT_PORT};
	struct event *signals;
	int signal_fd;

	parse_options(argc, argv, &envd, &options);
	open_standard_files();
	tune_allocator();
	umask(022);
	raise_file_limit(&envd);
	envd.base = new_base();
	signals = watch_signals(&envd, &signal_fd);
	envd.http = http_server_new(&envd);
	envd.processes = processes_new(&envd);
	envd.identity = identity_new(&envd);
	if (!envd.http || !envd.processes || !envd.identity)
		fail("starting");
	register_all(&envd);
	printf("listening on port %d\n", serve_on(&envd, &options));
	fflush(stdout);

	event_base_dispatch(envd.base);

	http_server_free(envd.http);
	fs_unregister(&envd);
	processes_free(envd.processes);
	identity_free(envd.identity);
	event_free(signals);
	close(signal_fd);
	event_base_free(envd.base);
	clear(&envd);
	return 0;
}
