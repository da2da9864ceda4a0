#define _GNU_SOURCE
#include "world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fuzz.h"
#include "http_internal.h"
#include "identity.h"
#include "path.h"
#include "process.h"
#include "remove.h"
#include "spawn.h"

enum {
	MAX_PROCESSES = 32,
	MAX_PORTS = 32,
	FIRST_PID = 5000000, /* above the kernel's limit: never a real process */
	TURNS = 8,           /* of the loop after each thing that happens */
	LAST_TURNS = 500,    /* until everything must be over */
	SMALL_BUFFER = 4096,
	BIG = 400 * 1024,
};

struct client {
	int fd; /* -1: not connected */
	bool reading, said_something;
};

struct fake {
	int in, out, err; /* the process's ends, -1: closed or none */
	int status;
	bool ended, reaped;
};

struct world {
	struct envd envd;
	struct client clients[WORLD_CLIENTS];
	struct fake processes[MAX_PROCESSES];
	size_t n_processes;
	int ports[MAX_PORTS];
	size_t n_ports;
	size_t open_descriptors; /* before anything began */
	bool hurry;
};

/* The wrapped functions have no context of ours. One input runs at a time. */
static struct world *current;
static char base[64], scratch[80]; /* base/files */
static bool scratch_used;

/* ---- the scratch folder ---- */

static void remove_scratch(void)
{
	remove_all(base);
}

static void write_sample(const char *name, const char *text)
{
	char path[PATH_MAX];
	int fd;

	CHECK(path_join(scratch, name, path));
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* One file of noise, which does not get smaller by gzip, and one of zeros, which does. They are too large to be written
 * each time, so they lie beside the folder and are linked into it. */
static void make_big(void)
{
	uint32_t noise[BIG / 4], state = 1;
	char path[PATH_MAX];
	size_t i;
	int fd;

	for (i = 0; i < BIG / 4; i++)
		noise[i] = state = state * 1664525 + 1013904223;
	CHECK(path_join(base, "noise", path) && (fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644)) >= 0);
	CHECK(write(fd, noise, sizeof noise) == sizeof noise && close(fd) == 0);
	CHECK(path_join(base, "zeros", path) && (fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644)) >= 0);
	CHECK(ftruncate(fd, BIG) == 0 && close(fd) == 0);
}

static void link_big(const char *name)
{
	char from[PATH_MAX], to[PATH_MAX];

	CHECK(path_join(base, name, from) && path_join(scratch, name, to) && link(from, to) == 0);
}

static void fill_scratch(void)
{
	char path[PATH_MAX], text[2000];

	if (!scratch[0]) {
		const char *folder = getenv("TMPDIR");

		snprintf(base, sizeof base, "%.40s/envd-fuzz-XXXXXX", folder ? folder : "/tmp");
		CHECK(mkdtemp(base));
		snprintf(scratch, sizeof scratch, "%s/files", base);
		atexit(remove_scratch);
		make_big();
		scratch_used = true;
	}
	if (!scratch_used)
		return;
	remove_all(scratch);
	CHECK(mkdir(scratch, 0755) == 0);
	CHECK(path_join(scratch, "d", path) && mkdir(path, 0755) == 0);
	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = 0;
	write_sample("a", "some text\n");
	write_sample("b.txt", text);
	write_sample("empty", "");
	write_sample("d/c", "{}");
	link_big("noise");
	link_big("zeros");
	scratch_used = false;
}

/* "..", which absolute paths may hold, would lead out of the folder. */
static void clean_into(const char *path, char out[PATH_MAX])
{
	size_t used = 0;

	while (*path) {
		size_t length;

		path += strspn(path, "/");
		length = strcspn(path, "/");
		if (length == 2 && memcmp(path, "..", 2) == 0) {
			while (used > 0 && out[--used] != '/')
				;
		} else if (length > 0 && !(length == 1 && *path == '.')) {
			out[used++] = '/';
			memcpy(out + used, path, length);
			used += length;
		}
		path += length;
	}
	out[used] = 0;
}

enum path_status __real_path_resolve(const char *raw, size_t length, const char *home, const char *workdir,
				     char out[PATH_MAX]);
enum path_status __wrap_path_resolve(const char *raw, size_t length, const char *home, const char *workdir,
				     char out[PATH_MAX])
{
	char plain[PATH_MAX], inside[PATH_MAX];
	enum path_status status = __real_path_resolve(raw, length, home, workdir, plain);

	if (status != PATH_OK)
		return status;
	scratch_used = true;
	clean_into(plain, inside);
	if (strlen(scratch) + strlen(inside) >= PATH_MAX)
		return PATH_TOO_LONG;
	strcpy(stpcpy(out, scratch), inside);
	return PATH_OK;
}

/* ---- users and processes ---- */

bool __wrap_user_lookup(const char *name, struct user *user)
{
	if (strcmp(name, "root") != 0 && strcmp(name, "user") != 0)
		return false;
	memset(user, 0, sizeof *user);
	user->name = strdup(name);
	user->home = strdup("/");
	user->shell = strdup("/bin/sh");
	user->uid = getuid();
	user->gid = getgid();
	return true;
}

static int nonblocking_pipe(int *read_end, int *write_end)
{
	int fds[2];

	if (pipe2(fds, O_NONBLOCK | O_CLOEXEC) < 0)
		return -1;
	*read_end = fds[0];
	*write_end = fds[1];
	return 0;
}

static void fake_close(struct fake *fake)
{
	if (fake->in >= 0)
		close(fake->in);
	if (fake->out >= 0 && fake->out != fake->in)
		close(fake->out);
	if (fake->err >= 0)
		close(fake->err);
	fake->in = fake->out = fake->err = -1;
}

static void fill(int fd)
{
	static const char nothing[4096];

	CHECK(fcntl(fd, F_SETPIPE_SZ, sizeof nothing) >= 0);
	while (write(fd, nothing, sizeof nothing) > 0)
		;
}

int __wrap_spawn_process(const struct spawn_request *request, struct spawn_result *result)
{
	struct fake *fake = &current->processes[current->n_processes];
	int pair[2];

	*result = (struct spawn_result){.pid = -1, .in = -1, .out = -1, .err = -1, .stage = SPAWN_EXEC};
	if (request->argv[0][0] == '!') /* a name by which the input asks for a failure */
		return ENOENT;
	if (current->n_processes == MAX_PROCESSES)
		return EAGAIN;
	*fake = (struct fake){-1, -1, -1, 0, false, false};
	if (request->pty) {
		CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
		result->out = pair[0];
		fake->in = fake->out = pair[1];
	} else {
		CHECK(nonblocking_pipe(&result->out, &fake->out) == 0);
		CHECK(nonblocking_pipe(&result->err, &fake->err) == 0);
		if (request->stdin_open)
			CHECK(nonblocking_pipe(&fake->in, &result->in) == 0);
		if (request->stdin_open && request->argv[0][0] == '.')
			fill(result->in);
	}
	result->pid = FIRST_PID + (pid_t)current->n_processes++;
	return 0;
}

static void fake_end(struct fake *fake, int status)
{
	if (fake->ended)
		return;
	fake->ended = true;
	fake->status = status;
}

int __wrap_kill(pid_t pid, int number)
{
	CHECK(pid >= FIRST_PID && pid < FIRST_PID + (pid_t)current->n_processes);
	CHECK(!current->processes[pid - FIRST_PID].reaped);
	fake_end(&current->processes[pid - FIRST_PID], number);
	return 0;
}

pid_t __wrap_waitpid(pid_t pid, int *status, int options)
{
	size_t i;

	CHECK(pid == -1 && options == WNOHANG);
	for (i = 0; i < current->n_processes; i++) {
		struct fake *fake = &current->processes[i];

		if (!fake->ended || fake->reaped)
			continue;
		fake->reaped = true;
		*status = fake->status;
		return FIRST_PID + (pid_t)i;
	}
	return 0;
}

/* ---- ports of the guest ---- */

int __wrap_socket(int domain, int type, int protocol)
{
	int pair[2];

	if (current->n_ports == MAX_PORTS) {
		errno = EMFILE;
		return -1;
	}
	CHECK(socketpair(AF_UNIX, type, 0, pair) == 0);
	current->ports[current->n_ports++] = pair[1];
	return pair[0];
}

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	return 0;
}

/* ---- the agent ---- */

int __real_event_assign(struct event *event, struct event_base *base, evutil_socket_t fd, short what,
			event_callback_fn callback, void *arg);
/* An event that is set up anew while it waits in the loop corrupts the loop's lists: it may turn for ever. (libevent's
 * own debug mode finds that too, but its memory of events grows and looks like a leak.) */
int __wrap_event_assign(struct event *event, struct event_base *base, evutil_socket_t fd, short what,
			event_callback_fn callback, void *arg)
{
	CHECK(!event_initialized(event) || !event_pending(event, EV_READ | EV_WRITE | EV_TIMEOUT | EV_SIGNAL, NULL));
	return __real_event_assign(event, base, fd, what, callback, arg);
}

int __real_event_add(struct event *event, const struct timeval *after);
int __wrap_event_add(struct event *event, const struct timeval *after)
{
	static const struct timeval now = {0, 0};

	return __real_event_add(event, after && current->hurry ? &now : after);
}

static size_t count_descriptors(void)
{
	DIR *folder = opendir("/proc/self/fd");
	size_t n = 0;

	CHECK(folder);
	while (readdir(folder))
		n++;
	closedir(folder);
	return n;
}

static void receive(struct client *client)
{
	char buffer[65536];
	ssize_t got;

	if (client->fd < 0 || !client->reading)
		return;
	while ((got = recv(client->fd, buffer, sizeof buffer, 0)) > 0) {
		if (!client->said_something)
			CHECK(got < 9 || memcmp(buffer, "HTTP/1.1 ", 9) == 0);
		client->said_something = true;
	}
}

static void turn(struct world *world, unsigned turns)
{
	unsigned i;

	while (turns-- > 0) {
		processes_reap(world->envd.processes);
		event_base_loop(world->envd.base, EVLOOP_ONCE | EVLOOP_NONBLOCK);
		for (i = 0; i < WORLD_CLIENTS; i++)
			receive(&world->clients[i]);
	}
}

static void start_agent(struct envd *envd)
{
	envd->base = event_base_new();
	CHECK(envd->base);
	envd->default_user = strdup("root");
	envd->no_system = true;
	envd->http = http_server_new(envd);
	envd->processes = processes_new(envd);
	envd->identity = identity_new(envd);
	CHECK(envd->http && envd->processes && envd->identity && getrlimit(RLIMIT_NOFILE, &envd->file_limit) == 0);
	health_register(envd);
	init_register(envd);
	metrics_register(envd);
	dial_register(envd);
	process_register(envd);
	files_register(envd);
	fs_register(envd);
}

static void stop_agent(struct envd *envd)
{
	http_server_free(envd->http);
	fs_unregister(envd);
	processes_free(envd->processes);
	identity_free(envd->identity);
	event_base_free(envd->base);
	free(envd->metrics);
	free(envd->token);
	free(envd->default_user);
	free(envd->default_workdir);
	free(envd->sandbox_id);
	free(envd->template_id);
	json_decref(envd->env_vars);
}

struct world *world_new(void)
{
	static bool started;
	struct world *world = calloc(1, sizeof *world);
	size_t i;

	CHECK(world);
	if (!started) {
		signal(SIGPIPE, SIG_IGN);
		started = true;
	}
	current = world;
	fill_scratch();
	world->open_descriptors = count_descriptors();
	for (i = 0; i < WORLD_CLIENTS; i++)
		world->clients[i].fd = -1;
	start_agent(&world->envd);
	return world;
}

void world_free(struct world *world)
{
	size_t i;

	for (i = 0; i < WORLD_CLIENTS; i++)
		world_close(world, (unsigned)i);
	for (i = 0; i < world->n_ports; i++)
		if (world->ports[i] >= 0)
			close(world->ports[i]);
	for (i = 0; i < LAST_TURNS && LIST_FIRST(&world->envd.http->connections); i++)
		turn(world, 1);
	CHECK(LIST_EMPTY(&world->envd.http->connections));
	for (i = 0; i < world->n_processes; i++) {
		fake_end(&world->processes[i], 0);
		fake_close(&world->processes[i]);
	}
	turn(world, TURNS);
	CHECK(!process_first(world->envd.processes));
	/* Nothing is left to do: a loop that keeps itself awake is a fault too. */
	CHECK(world->hurry || event_base_get_num_events(world->envd.base, EVENT_BASE_COUNT_ACTIVE) == 0);
	stop_agent(&world->envd);
	CHECK(count_descriptors() == world->open_descriptors);
	free(world);
	current = NULL;
}

/* ---- clients ---- */

static void connect_client(struct world *world, unsigned i)
{
	struct client *client = &world->clients[i];
	struct http_connection *conn;
	struct timeval soon = {5, 0};
	int pair[2], size = SMALL_BUFFER;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
	*client = (struct client){.fd = pair[1], .reading = true};
	conn = connection_new(world->envd.http, pair[0], i != WORLD_STRANGER);
	CHECK(conn);
	event_add(&world->envd.http->sweep, &soon); /* as where a connection is accepted */
	world->envd.http->sweeping = true;
	connection_readable(conn);
}

void world_send(struct world *world, unsigned i, const char *data, size_t size)
{
	struct client *client = &world->clients[i];
	unsigned tries = 0;

	if (client->fd < 0)
		connect_client(world, i);
	while (size > 0 && tries++ < 64) {
		ssize_t sent = send(client->fd, data, size, MSG_NOSIGNAL);

		if (sent > 0) {
			data += sent;
			size -= (size_t)sent;
		} else if (errno != EAGAIN) {
			break; /* the agent has closed */
		}
		turn(world, 1);
	}
	turn(world, TURNS);
}

void world_half_close(struct world *world, unsigned i)
{
	if (world->clients[i].fd < 0)
		return;
	shutdown(world->clients[i].fd, SHUT_WR);
	turn(world, TURNS);
}

void world_close(struct world *world, unsigned i)
{
	if (world->clients[i].fd < 0)
		return;
	close(world->clients[i].fd);
	world->clients[i].fd = -1;
	turn(world, TURNS);
}

void world_set_reading(struct world *world, unsigned i, bool reading)
{
	world->clients[i].reading = reading;
	turn(world, TURNS);
}

void world_hurry(struct world *world)
{
	world->hurry = true;
	turn(world, TURNS);
}

/* ---- processes and ports ---- */

static struct fake *newest(struct world *world)
{
	return world->n_processes ? &world->processes[world->n_processes - 1] : NULL;
}

void world_process_write(struct world *world, bool error_too, size_t size)
{
	struct fake *fake = newest(world);
	char *data = calloc(1, size + 1);

	CHECK(data);
	if (fake && fake->out >= 0 && write(fake->out, data, size) < 0)
		CHECK(errno == EAGAIN || errno == EPIPE);
	if (fake && error_too && fake->err >= 0 && write(fake->err, data, size) < 0)
		CHECK(errno == EAGAIN || errno == EPIPE);
	free(data);
	turn(world, TURNS);
}

void world_process_end(struct world *world, int status)
{
	if (newest(world))
		fake_end(newest(world), status);
	turn(world, TURNS);
}

void world_process_close(struct world *world)
{
	if (newest(world))
		fake_close(newest(world));
	turn(world, TURNS);
}

void world_process_read(struct world *world)
{
	struct fake *fake = newest(world);
	char buffer[65536];

	if (fake && fake->in >= 0 && read(fake->in, buffer, sizeof buffer) < 0)
		CHECK(errno == EAGAIN || errno == ECONNRESET);
	turn(world, TURNS);
}

void world_port_write(struct world *world, const char *data, size_t size)
{
	if (world->n_ports && world->ports[world->n_ports - 1] >= 0)
		send(world->ports[world->n_ports - 1], data, size, MSG_NOSIGNAL);
	turn(world, TURNS);
}

void world_port_close(struct world *world)
{
	if (world->n_ports && world->ports[world->n_ports - 1] >= 0) {
		close(world->ports[world->n_ports - 1]);
		world->ports[world->n_ports - 1] = -1;
	}
	turn(world, TURNS);
}
