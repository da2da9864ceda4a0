/* GET /files: the contents of a file.
 *
 * A plain body goes out by sendfile(2). What must pass through the agent (compressed bodies, files of /proc whose size
 * nobody knows) is read in pieces of PIECE bytes, no more than TURN bytes before other clients get their turn, and
 * waits while the client does not take what was sent.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <zlib.h>

#include "content.h"
#include "files.h"
#include "path.h"

#define PIECE 65536
#define TURN (1 << 17)
/* Compression costs the guest's CPU more than the bytes cost the link, and defeats sendfile, unless the file is of
 * middle size. Clients that ask for nothing but gzip get it for every size. */
#define GZIP_SIZE_MIN 1024
#define GZIP_SIZE_MAX (1 << 20)
#define GZIP_WINDOW (15 + 16) /* zlib's way to say: with gzip header and trailer */

struct download {
	struct http_request *req;
	struct event *turn;
	int fd;
	bool compressed, ended;
	z_stream deflate;
};

struct source {
	char path[PATH_MAX];
	char name[PATH_MAX];
	struct stat st;
	int fd;
	bool sized; /* st_size is the number of bytes that reading gives */
	const char *type;
	ssize_t sample_length;
	char sample[512];
};

static bool open_source(struct source *source)
{
	/* Looking comes before opening: to open a device or a pipe can have effects of its own. */
	if (stat(source->path, &source->st) != 0) {
		errno = errno == ENOTDIR ? ENOENT : errno;
		return false;
	}
	if (!S_ISREG(source->st.st_mode)) {
		errno = S_ISDIR(source->st.st_mode) ? EISDIR : ENOTSUP;
		return false;
	}
	source->fd = open(source->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (source->fd < 0)
		return false;
	if (fstat(source->fd, &source->st) == 0 && S_ISREG(source->st.st_mode))
		return true;
	close(source->fd);
	errno = ENOTSUP;
	return false;
}

/* Files of the kernel have a size of 0 or of one page, whatever they contain. */
static bool has_true_size(int fd, const struct stat *st)
{
	struct statfs fs;

	if (st->st_size == 0 || fstatfs(fd, &fs) != 0)
		return false;
	switch ((unsigned)fs.f_type) {
	case PROC_SUPER_MAGIC:
	case SYSFS_MAGIC:
	case CGROUP_SUPER_MAGIC:
	case CGROUP2_SUPER_MAGIC:
	case DEBUGFS_MAGIC:
	case TRACEFS_MAGIC:
	case SECURITYFS_MAGIC:
		return false;
	default:
		return true;
	}
}

/* Streaming */

static void download_close(struct http_request *req)
{
	struct download *download = req->state;

	if (download->compressed)
		deflateEnd(&download->deflate);
	if (download->turn)
		event_free(download->turn);
	close(download->fd);
	free(download);
}

static void send_compressed(struct download *download, char *data, size_t length, int flush)
{
	unsigned char out[PIECE];

	download->deflate.next_in = (unsigned char *)data;
	download->deflate.avail_in = length;
	do {
		download->deflate.next_out = out;
		download->deflate.avail_out = sizeof out;
		deflate(&download->deflate, flush);
		http_write(download->req, out, sizeof out - download->deflate.avail_out);
	} while (download->deflate.avail_out == 0);
}

static void send_piece(struct download *download, char *data, size_t length)
{
	if (download->compressed)
		send_compressed(download, data, length, Z_NO_FLUSH);
	else
		http_write(download->req, data, length);
}

static void finish_download(struct download *download)
{
	download->ended = true;
	if (download->compressed)
		send_compressed(download, NULL, 0, Z_FINISH);
	http_end(download->req);
}

static ssize_t read_piece(int fd, char *piece)
{
	ssize_t length;

	do {
		length = read(fd, piece, PIECE);
	} while (length < 0 && errno == EINTR);
	/* Some files of the kernel block at their end instead of ending (/proc/kmsg). */
	return length < 0 && errno == EAGAIN ? 0 : length;
}

static void continue_download(struct download *download)
{
	char piece[PIECE];

	for (size_t done = 0; done < TURN && http_pending(download->req) <= HTTP_HIGH_WATER; done += PIECE) {
		ssize_t length = read_piece(download->fd, piece);
		if (length < 0) {
			download->ended = true;
			http_abort(download->req);
			return;
		}
		if (length == 0) {
			finish_download(download);
			return;
		}
		send_piece(download, piece, length);
	}
	if (http_pending(download->req) <= HTTP_HIGH_WATER)
		files_next_turn(download->turn);
}

static void on_turn(evutil_socket_t fd, short what, void *data)
{
	struct download *download = data;

	if (!download->ended)
		continue_download(download);
}

static void on_drain(struct http_request *req)
{
	struct download *download = req->state;

	if (!download->ended)
		continue_download(download);
}

/* Takes the source's descriptor. NULL after an answer was sent. */
static struct download *new_download(struct http_request *req, const struct source *source, bool compressed)
{
	struct download *download = calloc(1, sizeof *download);

	if (!download) {
		close(source->fd);
		http_reply_error(req, 503, "out of memory");
		return NULL;
	}
	download->req = req;
	download->fd = source->fd;
	req->state = download;
	req->on_close = download_close;
	req->on_drain = on_drain;
	download->turn = event_new(req->envd->base, -1, 0, on_turn, download);
	download->compressed = compressed && deflateInit2(&download->deflate, 1, Z_DEFLATED, GZIP_WINDOW, 8,
							  Z_DEFAULT_STRATEGY) == Z_OK;
	if (download->turn && download->compressed == compressed)
		return download;
	http_reply_error(req, 503, "out of memory");
	return NULL;
}

static void reply_compressed(struct http_request *req, struct source *source)
{
	struct download *download = new_download(req, source, true);

	if (!download)
		return;
	http_add_header(req, "Content-Encoding", "gzip");
	http_start(req, 200, source->type, -1);
	if (strcmp(req->method, "HEAD") == 0) {
		download->ended = true;
		http_end(req);
	} else {
		continue_download(download);
	}
}

/* A file without a size: its end is found by reading. What fits in one piece gets a Content-Length all the same. */
static void reply_unsized(struct http_request *req, struct source *source)
{
	struct download *download = new_download(req, source, false);
	char first[PIECE];
	size_t used = 0;

	if (!download)
		return;
	while (used < PIECE) {
		ssize_t length = read(source->fd, first + used, PIECE - used);
		if (length < 0 && errno != EAGAIN) {
			files_reply_errno(req, errno, source->path);
			return;
		}
		if (length <= 0) {
			download->ended = true;
			http_reply(req, 200, source->type, first, used);
			return;
		}
		used += length;
	}
	http_start(req, 200, source->type, -1);
	http_write(req, first, used);
	continue_download(download);
}

/* Negotiation */

/* If-Range holds a date here, for there are no entity tags: it must be the file's own. */
static const char *range_header(const struct http_request *req, const struct stat *st)
{
	const char *condition = http_header(req, "if-range");
	time_t when;

	if (condition && (!content_date(condition, &when) || when != st->st_mtim.tv_sec))
		return NULL;
	return http_header(req, "range");
}

/* True after a 304 or 412. */
static bool reply_conditional(struct http_request *req, const struct stat *st)
{
	const char *unmodified = http_header(req, "if-unmodified-since"),
		   *modified = http_header(req, "if-modified-since");
	time_t when;

	if (unmodified && !http_header(req, "if-match") && content_date(unmodified, &when) &&
	    st->st_mtim.tv_sec > when) {
		http_reply(req, 412, NULL, "", 0);
		return true;
	}
	if (modified && !http_header(req, "if-none-match") && content_date(modified, &when) &&
	    st->st_mtim.tv_sec <= when) {
		http_reply(req, 304, NULL, "", 0);
		return true;
	}
	return false;
}

static bool choose_gzip(const struct content_codings *codings, const struct source *source)
{
	if (!codings->gzip || source->st.st_size == 0)
		return false;
	if (!codings->identity)
		return true;
	if (codings->wants_identity || !source->sized)
		return false;
	return codings->wants_gzip || (source->st.st_size >= GZIP_SIZE_MIN && source->st.st_size <= GZIP_SIZE_MAX &&
				       content_compressible(source->type));
}

/* Takes the descriptor. */
static void reply_plain(struct http_request *req, struct source *source)
{
	uint64_t size = source->st.st_size, start = 0, length = size;
	char text[96];

	http_add_header(req, "Accept-Ranges", "bytes");
	switch (content_range(range_header(req, &source->st), size, &start, &length)) {
	case RANGE_UNSATISFIABLE:
		close(source->fd);
		snprintf(text, sizeof text, "bytes */%llu", (unsigned long long)size);
		http_add_header(req, "Content-Range", text);
		http_reply_error(req, 416, "range is not satisfiable: the file has %llu bytes",
				 (unsigned long long)size);
		break;
	case RANGE_PART:
		snprintf(text, sizeof text, "bytes %llu-%llu/%llu", (unsigned long long)start,
			 (unsigned long long)(start + length - 1), (unsigned long long)size);
		http_add_header(req, "Content-Range", text);
		http_reply_fd(req, 206, source->type, source->fd, start, length);
		break;
	case RANGE_WHOLE:
		http_reply_fd(req, 200, source->type, source->fd, 0, size);
	}
}

static void add_headers(struct http_request *req, struct source *source)
{
	char disposition[CONTENT_DISPOSITION_MAX], date[CONTENT_DATE_MAX];

	http_add_header(req, "Vary", "Accept-Encoding");
	content_disposition(source->name, disposition);
	http_add_header(req, "Content-Disposition", disposition);
	if (source->sized) {
		content_date_text(source->st.st_mtim.tv_sec, date);
		http_add_header(req, "Last-Modified", date);
	}
}

/* Takes the descriptor. */
static void reply_source(struct http_request *req, struct source *source)
{
	struct content_codings codings = content_codings(http_header(req, "accept-encoding"));

	source->sized = has_true_size(source->fd, &source->st);
	if (source->sized)
		source->sample_length = pread(source->fd, source->sample, sizeof source->sample, 0);
	source->type = content_type(source->name, source->sample,
				    source->sample_length > 0 ? source->sample_length : 0);
	if (!codings.gzip && !codings.identity) {
		close(source->fd);
		http_reply_error(req, 406, "no acceptable encoding found, supported: identity, gzip");
		return;
	}
	add_headers(req, source);
	if (source->sized && reply_conditional(req, &source->st))
		close(source->fd);
	else if (choose_gzip(&codings, source) && !(codings.identity && http_header(req, "range")))
		reply_compressed(req, source);
	else if (source->sized)
		reply_plain(req, source);
	else
		reply_unsized(req, source);
}

static void handle_get(struct http_request *req)
{
	struct source *source = calloc(1, sizeof *source);
	struct user user;
	char *path;

	if (!source) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	if (files_begin(req, "read", &path, &user)) {
		bool resolved = files_resolve(req, &user, path ? path : "", path ? strlen(path) : 0, source->path);
		user_clear(&user);
		free(path);
		path_base(source->path, source->name);
		if (resolved && !open_source(source))
			files_reply_errno(req, errno, source->path);
		else if (resolved)
			reply_source(req, source);
	}
	free(source);
}

void files_get_register(struct envd *envd)
{
	http_route(envd, "GET", "/files", HTTP_PUBLIC, handle_get);
	http_route(envd, "HEAD", "/files", HTTP_PUBLIC, handle_get);
}
