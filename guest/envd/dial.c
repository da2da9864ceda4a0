/* GET /dial?port=N: the host's way to a TCP port of the guest, also one bound to 127.0.0.1 or ::1 only.
 *
 * With `Connection: Upgrade` and `Upgrade: aenv-dial` the answer is 101 and the connection becomes the port's: raw
 * bytes both ways. What one side does not take is not read from the other, and the end of one direction (FIN) is passed
 * on while the other goes on.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include <event2/event_struct.h>

#include "http.h"

#define PROTOCOL "aenv-dial"
enum { CHUNK = 64 * 1024, BURST = 4, CONNECT_SECONDS = 5 };

struct tunnel;

/* One direction: from one socket to the other. */
struct flow {
	struct tunnel *tunnel;
	int from, to;
	char *rest;                /* read, not yet taken by `to`; NULL: nothing */
	size_t rest_at, rest_len;
	bool done;                 /* the end has been passed on */
	struct event readable, writable;
};

struct tunnel {
	struct event_base *base;
	struct flow flows[2];
	int fds[2];
	bool broken;
};

struct dial {
	struct http_request *req;  /* NULL once it is gone */
	uint16_t port;
	int fd;                    /* being connected */
	bool tried_v6;
	struct event connected;
};

/* ---- the tunnel ---- */

static void tunnel_free(struct tunnel *tunnel)
{
	size_t i;

	for (i = 0; i < 2; i++) {
		event_del(&tunnel->flows[i].readable);
		event_del(&tunnel->flows[i].writable);
		free(tunnel->flows[i].rest);
		close(tunnel->fds[i]);
	}
	free(tunnel);
}

static void flow_break(struct flow *flow)
{
	flow->tunnel->broken = true;
}

/* Sends what it can; returns how much, or -1 when the receiver is gone. */
static ssize_t push(struct flow *flow, const char *data, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t sent = send(flow->to, data + done, len - done, MSG_NOSIGNAL);

		if (sent >= 0)
			done += (size_t)sent;
		else if (errno == EAGAIN)
			break;
		else if (errno != EINTR)
			return -1;
	}
	return (ssize_t)done;
}

static bool keep_rest(struct flow *flow, const char *data, size_t len)
{
	flow->rest = malloc(len);
	if (!flow->rest)
		return false;
	memcpy(flow->rest, data, len);
	flow->rest_at = 0;
	flow->rest_len = len;
	event_del(&flow->readable);
	event_add(&flow->writable, NULL);
	return true;
}

static void flow_take(struct flow *flow, const char *data, size_t len)
{
	ssize_t sent = push(flow, data, len);

	if (sent < 0 || ((size_t)sent < len && !keep_rest(flow, data + sent, len - (size_t)sent)))
		flow_break(flow);
}

static void flow_end(struct flow *flow)
{
	event_del(&flow->readable);
	shutdown(flow->to, SHUT_WR);
	flow->done = true;
}

static void settle(struct tunnel *tunnel)
{
	if (tunnel->broken || (tunnel->flows[0].done && tunnel->flows[1].done))
		tunnel_free(tunnel);
}

static void on_readable(evutil_socket_t fd, short what, void *arg)
{
	struct flow *flow = arg;
	char buffer[CHUNK];
	int i;

	for (i = 0; i < BURST && !flow->rest && !flow->done && !flow->tunnel->broken; i++) {
		ssize_t got = recv(fd, buffer, sizeof buffer, 0);

		if (got > 0)
			flow_take(flow, buffer, (size_t)got);
		else if (got == 0)
			flow_end(flow);
		else if (errno == EAGAIN)
			break;
		else if (errno != EINTR)
			flow_break(flow);
		if (got > 0 && got < CHUNK)
			break;
	}
	settle(flow->tunnel);
}

static void on_writable(evutil_socket_t fd, short what, void *arg)
{
	struct flow *flow = arg;
	ssize_t sent = push(flow, flow->rest + flow->rest_at, flow->rest_len - flow->rest_at);

	if (sent < 0) {
		flow_break(flow);
	} else {
		flow->rest_at += (size_t)sent;
		if (flow->rest_at == flow->rest_len) {
			free(flow->rest);
			flow->rest = NULL;
			event_del(&flow->writable);
			event_add(&flow->readable, NULL);
		}
	}
	settle(flow->tunnel);
}

static void flow_init(struct tunnel *tunnel, struct flow *flow, int from, int to)
{
	flow->tunnel = tunnel;
	flow->from = from;
	flow->to = to;
	event_assign(&flow->readable, tunnel->base, from, EV_READ | EV_PERSIST, on_readable, flow);
	event_assign(&flow->writable, tunnel->base, to, EV_WRITE | EV_PERSIST, on_writable, flow);
	event_add(&flow->readable, NULL);
}

/* Takes both sockets; `early` are bytes of the client that came with its request. */
static void tunnel_start(struct event_base *base, int client, int port, const char *early, size_t early_len)
{
	struct tunnel *tunnel = calloc(1, sizeof *tunnel);

	if (!tunnel) {
		close(client);
		close(port);
		return;
	}
	tunnel->base = base;
	tunnel->fds[0] = client;
	tunnel->fds[1] = port;
	flow_init(tunnel, &tunnel->flows[0], client, port);
	flow_init(tunnel, &tunnel->flows[1], port, client);
	if (early_len > 0)
		flow_take(&tunnel->flows[0], early, early_len);
	settle(tunnel);
}

/* ---- connecting ---- */

static void dial_refused(struct dial *dial)
{
	http_reply_error(dial->req, 502, "port is not open");
}

static void dial_connected(struct dial *dial)
{
	struct event_base *base = dial->req->envd->base;
	int port = dial->fd, client;
	size_t early_len;
	char *early;

	dial->fd = -1;
	client = http_upgrade(dial->req, PROTOCOL, &early, &early_len);
	if (client >= 0)
		tunnel_start(base, client, port, early, early_len);
	else
		close(port);
	free(early);
}

/* EINPROGRESS, or why it cannot be. */
static int start_connect(struct dial *dial, int family)
{
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(dial->port),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(dial->port),
				  .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	const void *address = family == AF_INET ? (const void *)&v4 : (const void *)&v6;
	int on = 1;

	dial->fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (dial->fd < 0)
		return errno;
	setsockopt(dial->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	/* Success is awaited too: http_upgrade() must not be called while the request is being parsed. */
	return connect(dial->fd, address, family == AF_INET ? sizeof v4 : sizeof v6) < 0 ? errno : EINPROGRESS;
}

static void on_connected(evutil_socket_t fd, short what, void *arg);

/* Goes on after a connect() that ended with `error`. */
static void dial_step(struct dial *dial, int error)
{
	struct timeval patience = {CONNECT_SECONDS, 0};

	while (error && error != EINPROGRESS && !dial->tried_v6) {
		if (dial->fd >= 0)
			close(dial->fd);
		dial->tried_v6 = true;
		error = start_connect(dial, AF_INET6);
	}
	if (error == EINPROGRESS) {
		event_assign(&dial->connected, dial->req->envd->base, dial->fd, EV_WRITE, on_connected, dial);
		event_add(&dial->connected, &patience);
	} else if (error) {
		dial_refused(dial);
	} else {
		dial_connected(dial);
	}
}

static void on_connected(evutil_socket_t fd, short what, void *arg)
{
	socklen_t len = sizeof(int);
	int error = ETIMEDOUT;

	if (!(what & EV_TIMEOUT) && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0)
		error = errno;
	dial_step(arg, error);
}

static void dial_close(struct http_request *req)
{
	struct dial *dial = req->state;

	if (dial->fd >= 0) {
		if (event_initialized(&dial->connected))
			event_del(&dial->connected);
		close(dial->fd);
	}
	free(dial);
}

/* The body, if any, must be over before the bytes behind it are the port's. */
static void dial_start(struct http_request *req)
{
	struct dial *dial = req->state;

	dial_step(dial, start_connect(dial, AF_INET));
}

static uint16_t parse_port(const struct http_request *req)
{
	char *text = http_query(req, "port"), *end = NULL;
	unsigned long port = text && *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;

	if (!end || *end || port > UINT16_MAX)
		port = 0;
	free(text);
	return (uint16_t)port;
}

static void dial(struct http_request *req)
{
	const char *upgrade = http_header(req, "upgrade");
	uint16_t port = parse_port(req);
	struct dial *state;

	if (port == 0) {
		http_reply_error(req, 400, "port: must be a number from 1 to 65535");
		return;
	}
	if (!upgrade || strcasecmp(upgrade, PROTOCOL) != 0) {
		http_reply_error(req, 400, "upgrade: must be " PROTOCOL);
		return;
	}
	state = calloc(1, sizeof *state);
	if (!state) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	state->req = req;
	state->port = port;
	state->fd = -1;
	req->state = state;
	req->on_end = dial_start;
	req->on_close = dial_close;
}

void dial_register(struct envd *envd)
{
	http_route(envd, "GET", "/dial", HTTP_HOST, dial);
}
