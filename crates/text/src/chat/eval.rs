//! Rendering: runs the tree over the data, with the scopes of Jinja2.
//!
//! ```text
//! scopes:  globals ◄─ context ◄─ template ◄─ loop's pass, macro, with, block …    (a name is found outwards)
//! output:  │ text of the template │ text of a macro │ …    (the last buffer gets what is printed)
//! ```
//!
//! Limits: [`OUTPUT_MAX`] bytes of output, [`DEPTH_MAX`] macros inside each other. Invariants: each pass of
//! a loop has variables of its own; a macro sees the variables of where it was defined.

use super::day::Day;
use super::methods::{self, FUNCTIONS};
use super::python::str_of;
use super::slices;
use super::strings::Args;
use super::syntax::{Apply, Arg, Compare, Expr, For, Literal, Program, Stmt, Target};
use super::value::{
    Closure, Dict, Key, LoopState, OUTPUT_MAX, Res, Scope, Value, raised, unsupported, wrong_types,
};
use std::cmp::Ordering;
use std::rc::Rc;

/// Maximum macros inside each other.
const DEPTH_MAX: usize = 60;

/// A rendered text, and the ranges of its characters that `{% generation %}` blocks printed.
pub struct Rendered {
    pub text: String,
    pub spans: Vec<(usize, usize)>,
}

/// What ends a list of statements.
#[derive(PartialEq)]
enum Flow {
    Next,
    Continue,
    Break,
}

struct Eval<'a> {
    program: &'a Program,
    day: Option<Day>,
    /// The text, and above it the text of each macro and block that runs.
    buffers: Vec<String>,
    bytes: usize,
    /// Bytes and characters of the text that were counted.
    counted: (usize, usize),
    spans: Vec<(usize, usize)>,
    macros: usize,
}

/// Renders a template over its variables.
pub fn render<'v>(
    program: &Program,
    variables: impl Iterator<Item = (&'v str, Value)>,
    day: Option<Day>,
) -> Res<Rendered> {
    let globals = Scope::new(None);
    for (name, function) in FUNCTIONS {
        if let Some(name) = program.names.get(name) {
            globals.set(*name, Value::Function(function));
        }
    }
    let context = Scope::inside(&globals);
    for (name, value) in variables {
        let Some(name) = program.names.get(name) else {
            continue;
        };
        if program.late.contains(name) {
            return unsupported(
                "a variable of the conversation is set after an inner block reads it",
            );
        }
        context.set(*name, value);
    }
    let mut eval = Eval {
        program,
        day,
        buffers: vec![String::new()],
        bytes: 0,
        counted: (0, 0),
        spans: Vec::new(),
        macros: 0,
    };
    eval.run(&program.body, &Scope::inside(&context))?;
    Ok(Rendered {
        text: eval.buffers.swap_remove(0),
        spans: eval.spans,
    })
}

impl Eval<'_> {
    fn print(&mut self, text: &str) -> Res<()> {
        self.bytes += text.len();
        if self.bytes > OUTPUT_MAX {
            return unsupported(format!("the text is over {OUTPUT_MAX} bytes"));
        }
        self.buffers.last_mut().expect("never empty").push_str(text);
        Ok(())
    }

    /// What the statements print, in a scope of their own.
    fn captured(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Res<String> {
        self.buffers.push(String::new());
        let flow = self.run(body, scope)?;
        match self.buffers.pop() {
            Some(text) if flow == Flow::Next => Ok(text),
            _ => unsupported("`break` or `continue` in a block whose text is kept"),
        }
    }

    fn run(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Res<Flow> {
        for stmt in body {
            match self.stmt(stmt, scope)? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn stmt(&mut self, stmt: &Stmt, scope: &Rc<Scope>) -> Res<Flow> {
        match stmt {
            Stmt::Text(text) => self.print(text)?,
            Stmt::Emit(expr) => {
                let value = self.expr(expr, scope)?;
                self.print_value(&value)?;
            }
            Stmt::If(cond, then, otherwise) => {
                let branch = match self.expr(cond, scope)?.is_true() {
                    true => then,
                    false => otherwise,
                };
                return self.run(branch, scope);
            }
            Stmt::For(each) => self.each(each, scope)?,
            Stmt::Set(target, expr) => {
                let value = self.expr(expr, scope)?;
                assign(target, value, scope)?;
            }
            Stmt::SetBlock(target, filters, body) => {
                let text = self.captured(body, &Scope::inside(scope))?;
                let value = self.filtered(text.into(), filters, scope)?;
                assign(target, value, scope)?;
            }
            Stmt::FilterBlock(filters, body) => {
                let text = self.captured(body, &Scope::inside(scope))?;
                let value = self.filtered(text.into(), filters, scope)?;
                self.print_value(&value)?;
            }
            Stmt::With(set, body) => {
                let inner = Scope::inside(scope);
                for (target, expr) in set {
                    let value = self.expr(expr, scope)?;
                    assign(target, value, &inner)?;
                }
                return self.run(body, &inner);
            }
            Stmt::Macro(name, number) => scope.set(*name, closure(*number, scope)),
            Stmt::Call(call, number) => self.call_block(call, *number, scope)?,
            Stmt::Generation(body) => self.generation(body, scope)?,
            Stmt::Continue => return Ok(Flow::Continue),
            Stmt::Break => return Ok(Flow::Break),
        }
        Ok(Flow::Next)
    }

    fn print_value(&mut self, value: &Value) -> Res<()> {
        if let Some(text) = value.as_str() {
            return self.print(text);
        }
        let mut text = String::new();
        str_of(value, &mut text)?;
        self.print(&text)
    }

    fn each(&mut self, each: &For, scope: &Rc<Scope>) -> Res<()> {
        let mut items = self.expr(&each.iter, scope)?.iterate()?;
        if let Some(filter) = &each.filter {
            let mut kept = Vec::new();
            for item in &*items {
                let inner = Scope::inside(scope);
                assign(&each.target, item.clone(), &inner)?;
                if self.expr(filter, &inner)?.is_true() {
                    kept.push(item.clone());
                }
            }
            items = Rc::new(kept);
        }
        if items.is_empty() {
            return self.run(&each.otherwise, &Scope::inside(scope)).map(|_| ());
        }
        let loop_name = self.program.names.get("loop").copied();
        for (at, item) in items.iter().enumerate() {
            let inner = Scope::inside(scope);
            assign(&each.target, item.clone(), &inner)?;
            if let Some(name) = loop_name {
                let items = items.clone();
                inner.set(name, Value::Loop(Rc::new(LoopState { items, at })));
            }
            if self.run(&each.body, &inner)? == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// `transformers` counts the characters that the template itself has printed so far, not those
    /// of a macro that runs; so does this.
    fn generation(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Res<()> {
        let text = self.captured(body, &Scope::inside(scope))?;
        let (bytes, chars) = self.counted;
        let printed = &self.buffers[0];
        let start = chars + printed[bytes..].chars().count();
        self.counted = (printed.len(), start);
        self.spans.push((start, start + text.chars().count()));
        self.print(&text)
    }

    fn call_block(&mut self, call: &Expr, number: usize, scope: &Rc<Scope>) -> Res<()> {
        let Expr::Call(callee, args) = call else {
            return unsupported("a call block without a call");
        };
        let callee = self.expr(callee, scope)?;
        let mut args = self.args(args, scope)?;
        args.named.push(("caller".into(), closure(number, scope)));
        let value = self.call(&callee, args)?;
        self.print_value(&value)
    }

    fn filtered(&mut self, value: Value, filters: &[Apply], scope: &Rc<Scope>) -> Res<Value> {
        filters.iter().try_fold(value, |value, apply| {
            let args = self.args(&apply.args, scope)?;
            (apply.filter)(value, args)
        })
    }

    fn args(&mut self, args: &[Arg], scope: &Rc<Scope>) -> Res<Args> {
        let mut made = Args::default();
        for arg in args {
            match arg {
                Arg::Pos(expr) => made.pos.push(self.expr(expr, scope)?),
                Arg::Named(name, expr) => made.named.push((name.clone(), self.expr(expr, scope)?)),
            }
        }
        Ok(made)
    }

    fn call(&mut self, callee: &Value, args: Args) -> Res<Value> {
        match callee {
            Value::Method(value, name) => methods::method(value, name, args),
            Value::Function(function) => methods::function(*function, args, self.day),
            Value::Macro(closure) => self.call_macro(closure, args),
            Value::Undefined => raised("what is called is undefined"),
            Value::Loop(_) => unsupported("a recursive loop"),
            _ => raised(format!("'{}' object is not callable", callee.kind())),
        }
    }

    fn call_macro(&mut self, closure: &Closure, args: Args) -> Res<Value> {
        let decl = &self.program.macros[closure.number];
        let inner = Scope::inside(&closure.scope);
        let name = &decl.name;
        if args.pos.len() > decl.params.len() {
            let count = decl.params.len();
            return raised(format!(
                "macro {name:?} takes not more than {count} argument(s)"
            ));
        }
        let given = args.pos.len();
        for ((param, ..), value) in decl.params.iter().zip(args.pos) {
            inner.set(*param, value);
        }
        let mut named = args.named;
        for (param, known, default) in &decl.params[given..] {
            let at = named.iter().position(|(name, _)| name == known);
            let value = match (at, default) {
                (Some(at), _) => named.swap_remove(at).1,
                (None, Some(default)) => self.expr(default, &inner)?,
                (None, None) => Value::Undefined,
            };
            inner.set(*param, value);
        }
        if let Some(caller) = decl.caller {
            let at = named.iter().position(|(name, _)| &**name == "caller");
            let value = at.map_or(Value::Undefined, |at| named.swap_remove(at).1);
            inner.set(caller, value);
        }
        if let Some((other, _)) = named.first() {
            return raised(format!(
                "macro {name:?} takes no keyword argument {other:?}"
            ));
        }
        self.macros += 1;
        if self.macros > DEPTH_MAX {
            return unsupported(format!("more than {DEPTH_MAX} macros inside each other"));
        }
        let text = self.captured(&decl.body, &inner)?;
        self.macros -= 1;
        Ok(text.into())
    }

    fn expr(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Res<Value> {
        Ok(match expr {
            Expr::Literal(literal) => match literal {
                Literal::None => Value::None,
                Literal::Bool(value) => Value::Bool(*value),
                Literal::Int(value) => Value::Int(*value),
                Literal::Float(value) => Value::Float(*value),
                Literal::Str(text) => Value::Str(text.clone()),
            },
            Expr::Var(name) => scope.get(*name).unwrap_or(Value::Undefined),
            Expr::Attr(of, name) => methods::attribute(&self.expr(of, scope)?, name)?,
            Expr::Item(both) => {
                let value = self.expr(&both.0, scope)?;
                methods::item(&value, &self.expr(&both.1, scope)?)?
            }
            Expr::Slice(parts) => {
                let value = self.expr(&parts.0, scope)?;
                let mut bounds = [const { None }; 3];
                for (bound, expr) in bounds.iter_mut().zip(&parts.1) {
                    *bound = expr
                        .as_ref()
                        .map(|expr| self.expr(expr, scope))
                        .transpose()?;
                }
                slices::slice(&value, bounds)?
            }
            Expr::Not(of) => Value::Bool(!self.expr(of, scope)?.is_true()),
            Expr::Neg(of) => match self.expr(of, scope)? {
                Value::Float(value) => Value::Float(-value),
                value => match value.as_int().and_then(i64::checked_neg) {
                    Some(value) => Value::Int(value),
                    None => return wrong_types("-", &value, &value),
                },
            },
            Expr::And(both) => match self.expr(&both.0, scope)? {
                value if value.is_true() => self.expr(&both.1, scope)?,
                value => value,
            },
            Expr::Or(both) => match self.expr(&both.0, scope)? {
                value if value.is_true() => value,
                _ => self.expr(&both.1, scope)?,
            },
            Expr::Binary(op, both) => {
                let left = self.expr(&both.0, scope)?;
                op.of(&left, &self.expr(&both.1, scope)?)?
            }
            Expr::Compare(first, others) => {
                let mut left = self.expr(first, scope)?;
                for (sign, right) in others {
                    let right = self.expr(right, scope)?;
                    if !holds(*sign, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expr::If(parts) => match (self.expr(&parts.0, scope)?.is_true(), &parts.2) {
                (true, _) => self.expr(&parts.1, scope)?,
                (false, Some(otherwise)) => self.expr(otherwise, scope)?,
                (false, None) => Value::Undefined,
            },
            Expr::Filter(of, apply) => {
                let value = self.expr(of, scope)?;
                let args = self.args(&apply.args, scope)?;
                (apply.filter)(value, args)?
            }
            Expr::Test(of, test, args) => {
                let value = self.expr(of, scope)?;
                let args = self.args(args, scope)?;
                if !args.named.is_empty() {
                    return unsupported("a test with named arguments");
                }
                Value::Bool(test(&value, &args.pos)?)
            }
            Expr::Call(callee, args) => {
                let callee = self.expr(callee, scope)?;
                let args = self.args(args, scope)?;
                self.call(&callee, args)?
            }
            Expr::List(items) => Value::list(self.all(items, scope)?),
            Expr::Tuple(items) => Value::tuple(self.all(items, scope)?),
            Expr::Dict(members) => {
                let mut dict = Dict::new();
                for (key, value) in members {
                    let key = self.expr(key, scope)?;
                    let Some(key) = Key::of(&key)? else {
                        return unsupported(format!("a key of type {} in a dict", key.kind()));
                    };
                    dict.insert(key, self.expr(value, scope)?);
                }
                Value::Dict(Rc::new(dict))
            }
        })
    }

    fn all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Res<Vec<Value>> {
        items.iter().map(|item| self.expr(item, scope)).collect()
    }
}

fn closure(number: usize, scope: &Rc<Scope>) -> Value {
    let scope = scope.clone();
    Value::Macro(Rc::new(Closure { number, scope }))
}

fn holds(sign: Compare, left: &Value, right: &Value) -> Res<bool> {
    match sign {
        Compare::Eq => left.equals(right),
        Compare::Ne => Ok(!left.equals(right)?),
        Compare::Lt => left.is_ordered(right, "<", Ordering::is_lt),
        Compare::Le => left.is_ordered(right, "<=", Ordering::is_le),
        Compare::Gt => left.is_ordered(right, ">", Ordering::is_gt),
        Compare::Ge => left.is_ordered(right, ">=", Ordering::is_ge),
        Compare::In => right.contains(left),
        Compare::NotIn => Ok(!right.contains(left)?),
    }
}

fn assign(target: &Target, value: Value, scope: &Rc<Scope>) -> Res<()> {
    match target {
        Target::Name(name) => scope.set(*name, value),
        Target::Attr(name, attribute) => match scope.get(*name) {
            Some(Value::Namespace(_)) if attribute.starts_with('_') => {
                return raised(format!(
                    "a namespace cannot store the attribute {attribute:?}"
                ));
            }
            Some(Value::Namespace(dict)) => {
                dict.borrow_mut().insert(Key::Str(attribute.clone()), value);
            }
            _ => return raised("cannot assign attribute on non-namespace object"),
        },
        Target::All(targets) => {
            let items = value.iterate()?;
            if items.len() != targets.len() {
                let count = items.len();
                let wanted = targets.len();
                return raised(format!("{count} values to unpack, {wanted} expected"));
            }
            for (target, item) in targets.iter().zip(&*items) {
                assign(target, item.clone(), scope)?;
            }
        }
    }
    Ok(())
}
