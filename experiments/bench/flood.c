/* An open-loop client of gRPC that costs some microseconds per request, for rates that `open_loop_client` cannot reach.

   flood PORT REQUEST_FILE PATH OFFERS SECONDS SLO_US SEED PATIENCE_MS

   REQUEST_FILE holds the serialised message. PATH is the method's. OFFERS is RATE:CONNECTIONS[,RATE:CONNECTIONS...]: each
   pair is a Poisson process over its own connections, and has an account of its own. A PATH of "http1:/path" speaks
   HTTP/1.1 instead, one request at a time per connection; a request for which no connection is free waits.

   A request's clock starts when it is due. It is sent when the server's windows and its limit of streams allow, and is
   given up unsent, as a client with a deadline does, when its SLO has passed by then. An answer after the SLO is `late`
   where it came to this kernel too late after the request was sent; else this client sent or read too late itself, which
   is `client_late`. Of those `late`, it is `late_kept` if this kernel had not sent all of the request at once, as where
   its congestion window is full: the server does not see how long it waits here. One line of JSON per pair.

   HTTP/2 is RFC 9113, written by hand; answers are judged by whether a message came before the end of the stream. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef int64_t ns_t;
enum { IN_BYTES = 1 << 17, PENDING_MAX = 1 << 16, GROUPS_MAX = 8 };

static ns_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* One request; of a connection they are numbered in the order of their streams. */
typedef struct {
    ns_t due, sent;
    char ended, message, kept;
} request;

typedef struct {
    int fd, group, writable;
    request *requests;
    int num, capacity;       /* requests that were sent */
    int open;                /* of which not ended */
    ns_t *pending;           /* due times of requests that wait to be sent */
    int head, tail;
    int64_t window, initial_window, streams_max;
    uint8_t in[IN_BYTES];
    int have;
    ns_t came;               /* when the last bytes came, by the kernel's stamp */
    int64_t skip;            /* of the frame that is being skipped */
    uint8_t *out;            /* what the socket has not taken */
    size_t out_begin, out_end, out_capacity;
} connection;

typedef struct {
    double rate;
    int first, connections;
    ns_t next;
    long offered, ok, late, late_kept, client_late, refused, given_up, unanswered;
    float *ok_ms, *refusal_ms;
    long ok_room, refusal_room;
} group;

static connection *conns;
static group groups[GROUPS_MAX];
static int num_groups, num_conns, http1;
static uint8_t *message, block[512], *whole;
static size_t message_bytes, block_bytes, whole_bytes;
static ns_t slo;
static uint64_t seed;

static double uniform(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return ((seed >> 11) + 0.5) / 9007199254740992.0;
}

static void note(float **list, long *room, long count, double value) {
    if (count >= *room) {
        *room = *room ? 2 * *room : 4096;
        if (!(*list = realloc(*list, *room * sizeof(float)))) die("memory");
    }
    (*list)[count] = value;
}

static void ended(connection *c, request *r, ns_t now, int ok) {
    group *g = groups + c->group;
    double ms = (now - r->due) / 1e6;
    if (r->ended) return;
    r->ended = 1;
    c->open--;
    if (!ok)
        note(&g->refusal_ms, &g->refusal_room, g->refused++, ms);
    else if (now - r->due > slo) {
        if (c->came - r->sent > slo) g->late++, g->late_kept += r->kept;
        else g->client_late++;
    }
    else
        note(&g->ok_ms, &g->ok_room, g->ok++, ms);
}

static void put(connection *c, const void *data, size_t size) {
    if (c->out_end + size > c->out_capacity) {
        memmove(c->out, c->out + c->out_begin, c->out_end - c->out_begin);
        c->out_end -= c->out_begin, c->out_begin = 0;
        while (c->out_end + size > c->out_capacity) c->out_capacity = 2 * c->out_capacity + 65536;
        if (!(c->out = realloc(c->out, c->out_capacity))) die("memory");
    }
    memcpy(c->out + c->out_end, data, size);
    c->out_end += size;
}

static void put_frame(connection *c, int type, int flags, uint32_t stream, const void *payload, size_t size) {
    uint8_t head[9] = {size >> 16, size >> 8, size, type, flags, stream >> 24, stream >> 16, stream >> 8, stream};
    put(c, head, 9);
    put(c, payload, size);
}

static void lost(connection *c) {
    fprintf(stderr, "connection lost\n");
    close(c->fd);
    c->fd = -1;
}

static void drain(connection *c) {
    while (c->out_begin < c->out_end) {
        ssize_t sent = send(c->fd, c->out + c->out_begin, c->out_end - c->out_begin, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) lost(c);
            else c->writable = 0;
            return;
        }
        c->out_begin += sent;
    }
    c->out_begin = c->out_end = 0;
}

/* Send requests that wait, as far as socket, windows and streams allow; give up those past their SLO. */
static void pump(connection *c, ns_t now) {
    group *g = groups + c->group;
    int first = c->num, unsent = 0;
    if (c->fd < 0) return;
    if (c->out_end > c->out_begin) {
        if (!c->writable) return;
        drain(c);
        if (c->fd < 0 || c->out_end > c->out_begin) return;
    }
    while (c->head < c->tail) {
        ns_t due = c->pending[c->head % PENDING_MAX];
        if (now - due > slo) {
            g->given_up++, c->head++;
            continue;
        }
        if (http1 ? c->open > 0
                  : c->open >= c->streams_max || c->window < (int64_t)message_bytes + 5 ||
                        c->initial_window < (int64_t)message_bytes + 5)
            break;
        if (c->out_end - c->out_begin > (1 << 16)) break;
        c->head++;
        if (c->num == c->capacity) {
            c->capacity = c->capacity ? 2 * c->capacity : 1024;
            if (!(c->requests = realloc(c->requests, c->capacity * sizeof(request)))) die("memory");
        }
        c->requests[c->num] = (request){due, now_ns()};
        c->open++;
        if (!http1) {
            uint32_t stream = 2 * c->num + 1;
            size_t at = c->out_end;
            put(c, whole, whole_bytes);
            at = c->out_end - whole_bytes;
            for (size_t i = 0; i < 2; i++) {
                uint8_t *id = c->out + at + (i ? 9 + block_bytes : 0) + 5;
                id[0] = stream >> 24, id[1] = stream >> 16, id[2] = stream >> 8, id[3] = stream;
            }
            c->window -= message_bytes + 5;
        } else
            put(c, whole, whole_bytes);
        c->num++;
    }
    if (c->out_end > c->out_begin && c->writable) drain(c);
    if (c->num > first && !ioctl(c->fd, SIOCOUTQNSD, &unsent) && (unsent || c->out_end > c->out_begin))
        while (first < c->num) c->requests[first++].kept = 1;
}

static uint32_t u32(const uint8_t *p) { return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]; }

static void frame(connection *c, int type, int flags, uint32_t stream, const uint8_t *payload, uint32_t size, ns_t now) {
    request *r = stream & 1 && (int)(stream / 2) < c->num ? c->requests + stream / 2 : NULL;
    if (type == 0 && r && size) r->message = 1;
    if ((type == 0 || type == 1) && flags & 1 && r) ended(c, r, now, r->message);
    if (type == 3 && r) ended(c, r, now, 0);
    if (type == 4 && !(flags & 1)) {
        for (uint32_t i = 0; i + 6 <= size; i += 6) {
            uint32_t value = u32(payload + i + 2);
            if (payload[i + 1] == 3) c->streams_max = value;
            if (payload[i + 1] == 4) c->initial_window = value;
        }
        put_frame(c, 4, 1, 0, "", 0);
    }
    if (type == 6 && !(flags & 1)) put_frame(c, 6, 1, 0, payload, size);
    if (type == 8 && !stream) c->window += u32(payload);
    if (type == 7) fprintf(stderr, "GOAWAY: %.*s\n", (int)size - 8, payload + 8);
}

static void take_http1(connection *c, ns_t now) {
    for (;;) {
        uint8_t *end = memmem(c->in, c->have, "\r\n\r\n", 4);
        if (!end) return;
        size_t head = end - c->in + 4, length = 0;
        *end = 0;
        char *field = strcasestr((char *)c->in, "content-length:");
        if (field) length = strtoul(field + 15, NULL, 10);
        if (c->have < (int)(head + length)) {
            *end = '\r';
            return;
        }
        if (c->num) ended(c, c->requests + c->num - 1, now, !memcmp(c->in + 9, "200", 3));
        memmove(c->in, c->in + head + length, c->have -= head + length);
    }
}

static void readable(connection *c) {
    for (;;) {
        struct iovec part = {c->in + c->have, IN_BYTES - c->have};
        char room[64];
        struct msghdr said = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        ssize_t got = recvmsg(c->fd, &said, 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            lost(c);
            return;
        }
        ns_t now = c->came = now_ns();
        struct cmsghdr *stamp = CMSG_FIRSTHDR(&said);
        if (stamp && stamp->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec at, wall;
            memcpy(&at, CMSG_DATA(stamp), sizeof at);
            clock_gettime(CLOCK_REALTIME, &wall);
            ns_t age = (wall.tv_sec - at.tv_sec) * 1000000000LL + wall.tv_nsec - at.tv_nsec;
            if (age > 0) c->came = now - age;
        }
        c->have += got;
        if (http1) {
            take_http1(c, now);
            continue;
        }
        int at = 0;
        while (c->have - at >= 9) {
            uint8_t *p = c->in + at;
            uint32_t size = p[0] << 16 | p[1] << 8 | p[2];
            if (c->have - at < (int)(9 + size)) break;
            frame(c, p[3], p[4], u32(p + 5) & 0x7fffffff, p + 9, size, now);
            at += 9 + size;
        }
        memmove(c->in, c->in + at, c->have -= at);
    }
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(float *list, long count, double part) { return count ? list[(long)(part * (count - 1))] : 0; }

static size_t text(uint8_t *to, int first, const char *name, const char *value) {
    size_t at = 0;
    to[at++] = first;
    if (name) at += sprintf((char *)to + at, "%c%s", (int)strlen(name), name);
    at += sprintf((char *)to + at, "%c%s", (int)strlen(value), value);
    return at;
}

int main(int argc, char **argv) {
    if (argc != 9) {
        fprintf(stderr, "flood PORT REQUEST_FILE PATH OFFERS SECONDS SLO_US SEED PATIENCE_MS\n");
        return 2;
    }
    /* Where that is allowed, the client is not what is slow. */
    struct sched_param priority = {1};
    sched_setscheduler(0, SCHED_FIFO, &priority);
    int port = atoi(argv[1]);
    double seconds = atof(argv[5]);
    slo = atoll(argv[6]) * 1000, seed = atoll(argv[7]) * 2654435761u + 88172645463325252u;
    ns_t patience = atoll(argv[8]) * 1000000;
    FILE *file = fopen(argv[2], "rb");
    if (!file) die(argv[2]);
    message = malloc(1 << 24), message_bytes = fread(message, 1, 1 << 24, file);
    http1 = !strncmp(argv[3], "http1:", 6);
    whole = malloc(message_bytes + 1024);
    if (http1) {
        whole_bytes = sprintf((char *)whole, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %zu\r\n\r\n", argv[3] + 6, message_bytes);
        memcpy(whole + whole_bytes, message, message_bytes), whole_bytes += message_bytes;
    } else {
        block[0] = 0x83, block[1] = 0x86, block_bytes = 2;
        block_bytes += text(block + block_bytes, 0x04, NULL, argv[3]);
        block_bytes += text(block + block_bytes, 0x01, NULL, "127.0.0.1");
        block_bytes += text(block + block_bytes, 0x00, "te", "trailers");
        block_bytes += text(block + block_bytes, 0x00, "content-type", "application/grpc");
        size_t size = message_bytes + 5;
        uint8_t head[9] = {0, block_bytes >> 8, block_bytes, 1, 4};
        uint8_t data[14] = {size >> 16, size >> 8, size, 0, 1, 0, 0, 0, 0, 0,
                            message_bytes >> 24, message_bytes >> 16, message_bytes >> 8, message_bytes};
        if (size > 16384) {
            fprintf(stderr, "flood: the message fills more than one frame\n");
            return 2;
        }
        memcpy(whole, head, 9), memcpy(whole + 9, block, block_bytes);
        memcpy(whole + 9 + block_bytes, data, 14), memcpy(whole + 23 + block_bytes, message, message_bytes);
        whole_bytes = 23 + block_bytes + message_bytes;
    }
    for (char *part = strtok(argv[4], ","); part && num_groups < GROUPS_MAX; part = strtok(NULL, ",")) {
        group *g = groups + num_groups++;
        if (sscanf(part, "%lf:%d", &g->rate, &g->connections) != 2) return 2;
        g->first = num_conns, num_conns += g->connections;
    }
    conns = calloc(num_conns, sizeof(connection));
    int poller = epoll_create1(0), which = 0;
    for (int i = 0; i < num_conns; i++) {
        connection *c = conns + i;
        while (i >= groups[which].first + groups[which].connections) which++;
        c->group = which, c->fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in to = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}};
        int yes = 1;
        if (connect(c->fd, (struct sockaddr *)&to, sizeof to)) die("connect");
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        setsockopt(c->fd, SOL_SOCKET, SO_TIMESTAMPNS, &yes, sizeof yes);
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        c->pending = malloc(PENDING_MAX * sizeof(ns_t));
        c->window = c->initial_window = 65535, c->streams_max = 1 << 30, c->writable = 1;
        if (!http1) {
            uint8_t settings[6] = {0, 4, 0x7f, 0xff, 0xff, 0xff}, room[4] = {0x7f, 0xfe, 0, 0};
            put(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
            put_frame(c, 4, 0, 0, settings, 6);
            put_frame(c, 8, 0, 0, room, 4);
            drain(c);
        }
        struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, {.u32 = i}};
        epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    }
    /* What the servers say first is read before the first request leaves. */
    usleep(50000);
    ns_t begin = now_ns() + 1000000, end = begin + (ns_t)(seconds * 1e9), worst = 0;
    for (int i = 0; i < num_groups; i++) groups[i].next = groups[i].rate > 0 ? begin : INT64_MAX;
    for (;;) {
        ns_t now = now_ns(), next = INT64_MAX;
        int busy = 0;
        for (int i = 0; i < num_groups; i++) {
            group *g = groups + i;
            while (g->next <= now && g->next < end) {
                connection *c = conns + g->first + (int)(uniform() * g->connections);
                if (http1)  /* any that is free, else one at random */
                    for (int j = 0; j < g->connections; j++)
                        if (!conns[g->first + j].open && conns[g->first + j].head == conns[g->first + j].tail) {
                            c = conns + g->first + j;
                            break;
                        }
                if (now - g->next > worst) worst = now - g->next;
                g->offered++;
                if (c->tail - c->head < PENDING_MAX) c->pending[c->tail++ % PENDING_MAX] = g->next;
                else g->given_up++;
                g->next += (ns_t)(-log(uniform()) / g->rate * 1e9);
            }
            if (g->next < end && g->next < next) next = g->next;
        }
        for (int i = 0; i < num_conns; i++) {
            if (conns[i].head < conns[i].tail || conns[i].out_end > conns[i].out_begin) pump(conns + i, now);
            busy |= conns[i].open > 0 || conns[i].head < conns[i].tail;
        }
        if (now >= end && (!busy || now > end + patience)) break;
        ns_t wait = next < end ? next - now : 1000000;
        if (wait < 0) wait = 0;
        if (wait > 1000000) wait = 1000000;
        struct timespec timeout = {0, wait};
        struct epoll_event events[64];
        int num = epoll_pwait2(poller, events, 64, &timeout, NULL);
        for (int i = 0; i < num; i++) {
            connection *c = conns + events[i].data.u32;
            if (c->fd < 0) continue;
            if (events[i].events & EPOLLOUT) c->writable = 1;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
            if (c->fd >= 0) pump(c, now_ns());
        }
    }
    for (int i = 0; i < num_conns; i++)
        for (int j = 0; j < conns[i].num; j++) groups[conns[i].group].unanswered += !conns[i].requests[j].ended;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    for (int i = 0; i < num_groups; i++) {
        group *g = groups + i;
        qsort(g->ok_ms, g->ok, sizeof(float), ascending);
        qsort(g->refusal_ms, g->refused, sizeof(float), ascending);
        printf("{\"offered\": %ld, \"ok\": %ld, \"late\": %ld, \"late_kept\": %ld, \"client_late\": %ld, \"refused\": %ld, \"given_up\": %ld, \"unanswered\": %ld, "
               "\"ok_ms_p50\": %.3f, \"ok_ms_p99\": %.3f, \"refusal_ms_p50\": %.3f, \"refusal_ms_p99\": %.3f, "
               "\"client_late_ms\": %.3f, \"client_cpu_s\": %.3f}\n",
               g->offered, g->ok, g->late, g->late_kept, g->client_late, g->refused, g->given_up, g->unanswered, percentile(g->ok_ms, g->ok, 0.5),
               percentile(g->ok_ms, g->ok, 0.99), percentile(g->refusal_ms, g->refused, 0.5),
               percentile(g->refusal_ms, g->refused, 0.99), worst / 1e6, cpu_s);
    }
    return 0;
}
