/* The HTTP server: listening, accepting, time-outs. Connections are in http_connection.c. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http_internal.h"

enum { SWEEP_SECONDS = 5 };

/* ---- accepting ---- */

static bool peer_is_host(const struct envd *envd, const struct sockaddr_storage *peer)
{
	char text[INET6_ADDRSTRLEN] = "";
	size_t i;

	if (peer->ss_family == AF_INET) {
		inet_ntop(AF_INET, &((const struct sockaddr_in *)peer)->sin_addr, text, sizeof text);
	} else if (peer->ss_family == AF_INET6) {
		const struct in6_addr *address = &((const struct sockaddr_in6 *)peer)->sin6_addr;

		if (IN6_IS_ADDR_V4MAPPED(address))
			inet_ntop(AF_INET, &address->s6_addr[12], text, sizeof text);
		else
			inet_ntop(AF_INET6, address, text, sizeof text);
	}
	for (i = 0; i < envd->n_host_addresses; i++)
		if (strcmp(envd->host_addresses[i], text) == 0)
			return true;
	return false;
}

static void sweep_start(struct http_server *server)
{
	struct timeval interval = {SWEEP_SECONDS, 0};

	if (!server->sweeping)
		event_add(&server->sweep, &interval);
	server->sweeping = true;
}

static void accepting_stop(struct http_server *server)
{
	size_t i;

	for (i = 0; i < server->n_listeners; i++)
		event_del(&server->listeners[i].event);
	server->accepting = false;
	sweep_start(server);
}

/* On the end of a connection, and at each sweep: descriptors come back from elsewhere too. */
void http_accepting_resume(struct http_server *server)
{
	size_t i;

	if (server->accepting)
		return;
	for (i = 0; i < server->n_listeners; i++)
		event_add(&server->listeners[i].event, NULL);
	server->accepting = server->n_listeners > 0;
}

/* One at a time: the loop comes back at once when more wait, and asking in vain costs a lone client a system call. */
static void on_connection(evutil_socket_t listener, short what, void *arg)
{
	struct http_server *server = arg;
	struct sockaddr_storage peer;
	socklen_t len = sizeof peer;
	struct http_connection *conn;
	int fd;

	if (server->n_connections >= HTTP_MAX_CONNECTIONS) {
		accepting_stop(server); /* until one ends; the others wait in the kernel's queue */
		return;
	}
	fd = accept4(listener, (struct sockaddr *)&peer, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (fd < 0) {
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
			accepting_stop(server);
		return;
	}
	conn = connection_new(server, fd, peer_is_host(server->envd, &peer));
	if (!conn) {
		close(fd);
		return;
	}
	sweep_start(server);
	connection_readable(conn); /* the request often is there already: saves a turn of the loop */
}

/* ---- time-outs ---- */

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
	struct http_server *server = arg;
	struct http_connection *conn, *next;
	time_t now = http_now();

	for (conn = LIST_FIRST(&server->connections); conn; conn = next) {
		next = LIST_NEXT(conn, link);
		if (connection_overdue(conn, now))
			connection_free(conn);
	}
	if (server->trim)
		malloc_trim(0);
	server->trim = false;
	server->sweeping = false;
	http_accepting_resume(server);
	if (server->n_connections > 0)
		sweep_start(server);
}

/* ---- life of the server ---- */

struct http_server *http_server_new(struct envd *envd)
{
	struct http_server *server = calloc(1, sizeof *server);

	if (!server)
		return NULL;
	server->envd = envd;
	LIST_INIT(&server->connections);
	evtimer_assign(&server->sweep, envd->base, on_sweep, server);
	http_parse_init(&server->settings);
	return server;
}

void http_server_free(struct http_server *server)
{
	struct http_connection *conn;
	size_t i;

	accepting_stop(server);
	server->accepting = true; /* connection_free() must not start it again */
	while ((conn = LIST_FIRST(&server->connections)))
		connection_free(conn);
	for (i = 0; i < server->n_listeners; i++)
		close(server->listeners[i].fd);
	event_del(&server->sweep);
	free(server);
}

static bool parse_address(const char *address, uint16_t port, struct sockaddr_storage *out, socklen_t *len)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)out;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;

	memset(out, 0, sizeof *out);
	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		*len = sizeof *v4;
		return true;
	}
	if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(port);
		*len = sizeof *v6;
		return true;
	}
	errno = EINVAL;
	return false;
}

/* Linux copies these options to accepted sockets: no system call per connection. */
static void set_options(int fd, int family)
{
	int on = 1, off = 0, idle = 60, interval = 15, count = 4;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
	if (family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
}

int http_server_listen(struct http_server *server, const char *address, uint16_t port)
{
	struct sockaddr_storage where;
	struct http_listener *listener;
	socklen_t len;
	int fd;

	if (server->n_listeners == HTTP_MAX_LISTENERS) {
		errno = ENOSPC;
		return -1;
	}
	if (!parse_address(address, port, &where, &len))
		return -1;
	fd = socket(where.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	set_options(fd, where.ss_family);
	if (bind(fd, (struct sockaddr *)&where, len) < 0 || listen(fd, 1024) < 0 ||
	    getsockname(fd, (struct sockaddr *)&where, &len) < 0) {
		int error = errno;

		close(fd);
		errno = error;
		return -1;
	}
	listener = &server->listeners[server->n_listeners++];
	listener->fd = fd;
	event_assign(&listener->event, server->envd->base, fd, EV_READ | EV_PERSIST, on_connection, server);
	event_add(&listener->event, NULL);
	server->accepting = true;
	return ntohs(where.ss_family == AF_INET ? ((struct sockaddr_in *)&where)->sin_port
						: ((struct sockaddr_in6 *)&where)->sin6_port);
}
